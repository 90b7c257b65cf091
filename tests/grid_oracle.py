"""What a policy keeps and recomputes, worked out from what it says of each value.

The region as its author wrote it is differentiated by JAX; every value of it is shown
to `policy.decide` with all that is known of it; what the backward pass needs follows.
Neither the rewriting of programs nor JAX's own splitting of a region takes part.
"""

import collections

import remat
from remat import testing
from remat._lint._program import Linted
from remat._naming._op_name import modules
from remat.policies import Decision, Value, kind_of

COUNTED = ("dot_general", "conv_general_dilated", "pallas_call")


class Actual:
    """What JAX does with one program under each policy."""

    def __init__(self, loss, args):
        self.loss, self.args = loss, args
        self.nothing = remat.residuals(remat.with_policy(loss, "nothing"), *args)
        self.without = self.counts("none")

    def counts(self, policy):
        return testing._counts(remat.with_policy(self.loss, policy), self.args, {})

    def kept(self, policy):
        """What is kept beyond the inputs of regions."""
        found = remat.residuals(remat.with_policy(self.loss, policy), *self.args)
        return testing._beyond(found, self.nothing)

    def of(self, policy):
        """What is kept, by type, and which products run again."""
        values = collections.Counter(
            (r.shape, r.dtype, "host" if r.on_host else "device", r.times)
            for r in self.kept(policy)
        )
        again = self.counts(policy)
        return values, {name: again[name] - self.without[name] for name in COUNTED}


def expected_of(traced, policy):
    """The same, from the decisions alone."""
    values, again = collections.Counter(), collections.Counter()
    for linted in traced.under("nothing").regions:
        flow, times = linted.flow, linted.region.times
        kept = decisions(linted, policy)
        needed, rerun = needed_and_rerun(flow, kept)
        for value in needed & kept.keys():
            on_host = kept[value] is Decision.OFFLOAD
            if not on_host and names_an_input(flow, value):
                continue  # kept in any case
            aval = flow.flow.values[value].aval
            where = "host" if on_host else "device"
            # JAX computes what no input changes once, before the loop.
            steps = times if varies(flow, value) else 1
            values[tuple(aval.shape), str(aval.dtype), where, steps] += 1
        for position in rerun & flow.forward:
            again[linted.primitive(position)] += times
    return values, {name: again[name] for name in COUNTED}


def names_an_input(flow, value):
    """Whether a value is an input of the region, under a name at most."""
    maker = flow.makers.get(value)
    if maker is None:
        return True
    equation = flow.equation(maker)
    is_name = equation.eqn.primitive.name == "name"
    return is_name and names_an_input(flow, equation.operands[0])


def varies(flow, value):
    """Whether a value depends on an input of the region."""
    makers = flow.flow.ancestors([value])
    read = {v for p in makers for v in flow.equation(p).operands} | {value}
    return bool(read & set(flow.flow.inputs))


def needed_and_rerun(flow, kept):
    """The values that the backward pass and the recompute read; what is recomputed."""
    pending, needed, rerun = list(flow.required), set(), set()
    while pending:
        value = pending.pop()
        needed.add(value)
        maker = flow.makers.get(value)
        if value not in kept and maker is not None and maker not in rerun:
            rerun.add(maker)
            pending.extend(flow.equation(maker).operands)
    return needed, rerun


def decisions(linted: Linted, policy):
    """What is kept, by value."""
    flow, kept = linted.flow, {}
    for position, value, described in values_of(linted):
        if not policy.needs_binding:
            kept[value] = policy.decide(as_jax_tells(described))
        elif position in flow.forward and not is_another_name(flow, position):
            # What only the derivative makes, such as the cosine of a sine, has no name.
            kept[value] = policy.decide(described)
    return {value: decision for value, decision in kept.items() if decision}


def is_another_name(flow, position):
    """Whether an equation names a value made in the region, which has an id already."""
    equation = flow.equation(position)
    is_name = equation.eqn.primitive.name == "name"
    return is_name and equation.operands[0] in flow.makers


def as_jax_tells(value):
    return Value(
        primitive=value.primitive,
        params=value.params,
        in_avals=value.in_avals,
        name=value.name,
        jax_primitive=value.jax_primitive,
    )


def values_of(linted):
    """Every value of the region with all that can be known of it."""
    flow = linted.flow
    ordinals = collections.Counter()
    for position in flow.known:
        equation = flow.equation(position)
        if equation.moves:
            continue
        eqn = equation.eqn
        kind = kind_of(eqn.primitive.name, eqn.params)
        scopes = [part for scope in equation.scopes for part in scope.split("/")]
        for value, var in zip(equation.results, eqn.outvars, strict=True):
            described = Value(
                primitive=eqn.primitive.name,
                params=eqn.params,
                in_avals=tuple(v.aval for v in eqn.invars),
                out_avals=(var.aval,),
                name=eqn.params["name"] if eqn.primitive.name == "name" else None,
                aliases=tuple(aliases(flow, value)),
                module_path="/".join(modules([s for s in scopes if s])),
                region_path=linted.region.path,
                ordinal=ordinals[kind],
                reads_input=any(v in flow.inputs for v in equation.operands),
                jax_primitive=eqn.primitive,
            )
            yield position, value, described
            if position in flow.forward:
                ordinals[kind] += 1


def aliases(flow, value):
    """The names that later equations give a value."""
    for reader in flow.readers.get(value, ()):
        equation = flow.equation(reader)
        if not equation.moves and equation.eqn.primitive.name == "name":
            yield equation.eqn.params["name"]
            yield from aliases(flow, equation.results[0])
