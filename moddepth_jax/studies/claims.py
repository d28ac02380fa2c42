"""One claim of a paper, or of ours: what it says, where it stands, and how it is judged."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from moddepth_jax.studies.statistics import Group, Interval, Place, choose, interval

HOLDS, FAILS, UNTOLD = 'holds', 'does not hold', 'cannot tell here'
NOTHING = '-'  # where a row has no number, spread or setting


class Evidence(NamedTuple):
    """What claims are judged by.

    Attributes:
      studies: dict of study.json, by the study's name.
      measures: dict of measures.json, by the name of the study beside which it lies.
      counted: FLOPs of models by shape and part; see `launch.claims_shapes`.
    """

    studies: dict[str, dict]
    measures: dict[str, dict]
    counted: dict[str, dict]


class Outcome(NamedTuple):
    """What came of a claim: our number, its spread, the verdict, why, and where it was measured."""

    ours: str
    spread: str
    verdict: str
    reason: str
    setting: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of the table.

    Attributes:
      id: a short name.
      topic: the part of the table that it stands in.
      claim: a sentence that can be right or wrong.
      source: paper, section or figure.
      paper: its number.
      rule: in words, when it holds and when not.
      judge: Evidence -> Outcome; None where nothing here can tell.
      needs: what would settle it where nothing was measured, with the command.
    """

    id: str
    topic: str
    claim: str
    source: str
    paper: str
    rule: str
    judge: Callable[[Evidence], Outcome | None] | None = None
    needs: str = ''

    def row(self, evidence: Evidence) -> dict[str, str]:
        """The row as claims.json has it."""
        outcome = self.judge(evidence) if self.judge else None
        if outcome is None:
            why = 'not measured' if self.judge else 'out of reach of a study'
            reason = f'{why}; needs {self.needs}' if self.needs else why
            outcome = Outcome(NOTHING, NOTHING, UNTOLD, reason, NOTHING)
        told = {name: getattr(self, name) for name in ('id', 'topic', 'claim', 'source', 'paper')}
        return {**told, 'rule': self.rule, **outcome._asdict()}


def verdict_below(found: Interval, bar: float = 0.0, form: str = '.3g') -> tuple[str, str]:
    """(verdict, reason) of the claim that a number lies below a bar."""
    if found.high < bar:
        return HOLDS, f'the whole interval lies below {bar:{form}}'
    if found.low > bar:
        return FAILS, f'the whole interval lies above {bar:{form}}'
    return UNTOLD, f'the interval contains {bar:{form}}'


def problem_of(groups: list[Group]) -> str:
    """The first reason why no verdict may rest on these groups, or ''."""
    return next((group.problem for group in groups if group.problem), '')


def told_groups(groups: list[Group]) -> str:
    """The losses of each, seed by seed."""
    return '; '.join(group.told() for group in groups)


def difference_outcome(place: Place, groups: list[Group], told: str = '') -> Outcome:
    """The verdict of the claim that the first of two groups has the lower loss, in bits a byte.

    Args:
      place: where they were trained.
      groups: two of them.
      told: text that ends `ours`.
    """
    first, second = groups
    difference = interval([first.values(), second.values()], (1.0, -1.0))
    share = difference.times(1 / second.mean())
    verdict, reason = verdict_below(difference)
    if problem_of(groups):
        verdict, reason = UNTOLD, problem_of(groups)
    names = f'{first.variant} {first.mean():.3f}, {second.variant} {second.mean():.3f} bits a byte'
    spread = f'{told_groups(groups)}; difference {difference.told("+.3f")}'
    ours = f'{names}: {share.told("+.1%")}{told}'
    return Outcome(ours, spread, verdict, reason, place.told(groups))


def lower_loss(first: str, second: str, kinds=('flops',), shared: bool = True):
    """A judge: the variant `first` has a lower loss than `second` at an equal budget.

    Args:
      first, second: names of variants.
      kinds: of studies.
      shared: compare them at one size; else each at its own best.
    """

    def pick(place):
        if shared:
            return place.shared(first, second)
        return [place.best(first), place.best(second)]

    def judge(evidence):
        found = choose(evidence.studies, pick, kinds)
        return difference_outcome(*found) if found else None

    return judge
