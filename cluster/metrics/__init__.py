"""What the system counts and measures, and the ways in which it tells.

`table.py` names every metric once; `meter.py` measures one worker's steps; `http.py` counts at the front door;
`exposition.py` is `/metrics`, `ray_export.py` the Ray dashboard, and `reference.py` the page in the docs.
"""
