"""Running one collected test as a rank in a fresh process, as if it had run in place.

>>> isolation = Isolation(session)
>>> isolation.start()                                       # after collection, before any test
>>> result = isolation.run(item, Assignment(rank=0), timeout=60)
>>> for report in conclude(item, nextitem, result.reports):
...     item.ihook.pytest_runtest_logreport(report=report)
>>> isolation.close()
"""

from pytest_gpumem.ranks.assignment import ASSIGNMENT, Assignment, in_child
from pytest_gpumem.ranks.conclude import conclude
from pytest_gpumem.ranks.isolation import Isolation, fork_is_safe
from pytest_gpumem.ranks.remains import RankResult

__all__ = ["ASSIGNMENT", "Assignment", "Isolation", "RankResult", "conclude", "fork_is_safe", "in_child"]
