"""The searches of rank orders in one piece; a coordinator of many members computes them piece by piece."""

from gridtrain.core.planning.rank_order import compare_rank_orders, search_rank_order
from gridtrain.core.planning.rank_order_search import in_one_piece

plan_rank_order = in_one_piece(search_rank_order)
reorder_reason = in_one_piece(compare_rank_orders)
