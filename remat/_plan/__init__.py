"""The planner.

_flow      a jaxpr as one dataflow, calls looked through and loops opened
_costs     FLOPs, bytes and seconds of an equation
_graph     what a region's backward pass needs, and what makes it
_prices    what a choice minimizes
_presolve  a smaller graph with the same optima
_program   the integer program
_solve     from a graph and a budget to a choice
_frontier  the choices at all budgets
_choose    one budget shared among regions
"""
