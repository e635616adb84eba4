"""The grade room: what the harness left behind becomes a verdict. ``patch`` extracts and judges the change,
``swebench`` runs the official evaluation in a fresh sandbox, ``report`` is the worker process around the package.
"""
