"""`diloco doctor`: what is wrong with this machine and its Redis, before a run is.

`facts` are what was measured, `checks` judges them and knows nothing else, `measure` measures, `command` tells.
"""
