"""Exchanges of gridtrain and of other systems, measured side by side over shaped links.

`gridtrain.tools.bench` measures gridtrain's exchanges, `rivals` those of other systems; `lab` shapes the
links.

    cells.py         Cell: what is exchanged, by how many members, over which link; parsed from text
    suites.py        lists of cells by name
    bounds.py        the least time that a link allows
    measurement.py   cells of the same link take turns, A B A B
    results.py       the JSON file
    report.py        its Markdown
    quick.py         ratios to gloo and to a memory copy, compared with those in the repository
"""
