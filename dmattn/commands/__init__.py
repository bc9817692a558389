"""The commands of ``python -m dmattn``, a file each, whose ``add`` gives the parser its options and whose ``run`` answers them.

Read in this order: ``parser`` (options, suggestions, results), ``info``, ``call`` (a call as options describe it), ``explain``, ``compile``,
``verify``, ``bench``, ``tune``, ``completion``.
"""
