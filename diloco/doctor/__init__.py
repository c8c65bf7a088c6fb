"""`diloco doctor`: find what is wrong with this machine and its Redis before a run fails because of it.

`measure` measures, `facts` has the types of what was measured, `checks` judges only the facts, `command` prints.
"""
