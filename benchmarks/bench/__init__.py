"""Our exchanges and others', measured side by side over shaped links.

Decides what is measured and how it is told.  How a figure of ours is taken:
`gridtrain.tools.bench`; how links are
shaped: `lab`; how the others run: `rivals`.

    cells.py     Cell: what is exchanged, by how many, over which link; read from text
    suites.py    cells by name: goals, quick, scaling, first
    goals.py     the goals with their numbers; met or not
    bounds.py    the least time that a link allows
    ground.py    namespaces with shaped cables, or loopback
    rivals_side.py  a rival's group on the same ground
    play.py      cells of the same link take turns, A B A B
    results.py   the JSON file
    report.py    Markdown and picture
    quick.py     ratios to gloo and to a memory copy, against those kept in the repository
"""
