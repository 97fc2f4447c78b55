"""Choice of budgets: miss ratios as a function of the budget, and the division of budgets between tables and tiers.

    advice = advise(model, ram="64GiB", ssd="1TiB")  # tables measure their traffic: TierBudgets(..., sizing=True)
    print(advice)

docs/sizing.md has worked examples.
"""

from torchrec_embcache.table.miss_ratio_curve import MissRatioCurve

from ._advice import BudgetAdvice, TableAdvice, advise
from ._traffic import TableTraffic, read_traffic, traffic_of, write_traffic

__all__ = [
    "BudgetAdvice",
    "MissRatioCurve",
    "TableAdvice",
    "TableTraffic",
    "advise",
    "read_traffic",
    "traffic_of",
    "write_traffic",
]
