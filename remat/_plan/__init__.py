"""The planner.

_flow      a jaxpr as one dataflow, calls looked through and loops opened
_costs     FLOPs, bytes and seconds of an equation
_graph     what a region's backward pass needs, and what makes it
_prices    what a choice minimizes
_presolve  a smaller graph with the same optima
_milp      HiGHS, silent
_program   the integer program
_solve     from a graph and a budget to a choice
_frontier  the choices at all budgets
_choose    one budget shared among regions
_kinds     the regions of a loss, equal ones together
_apply     a loss whose regions keep what was chosen
_by_name   whether checkpoint names can say what a plan keeps
_read      dataclasses from JSON
_errors    the planner's error
_steer     which point to compile next, from those compiled
_meter     the compiled peak of a candidate
_judge     which candidate is the plan
_named     the named policies as candidates
_opened    a loss made ready to be planned
_loop      the closed loop with the compiler
_make      from what the loop found to a plan
_plan      the public function
_plan_file the plan, and its file
_match     whether a plan's regions are those of a function
_check     whether a plan still holds
_curve     the frontier of a whole step
"""
