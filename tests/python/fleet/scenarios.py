"""The scenarios. At the start and at the end of each scenario, the fleet serves all models."""

from control import control, rolling
from deaths import deaths
from moves import moves
from names import names
from overhead import overhead
from placing import placing
from rollouts import rollouts
from scale import scale
from up import up

USUAL = {
    each.__name__: each for each in (up, names, moves, rollouts, deaths, control, rolling, overhead)
}
ALL = USUAL | {each.__name__: each for each in (scale, placing)}
