"""TorchRec's planner with this package's sharders. An unsupported constraint is rejected on every rank."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from torchrec_embcache import EmbCacheEmbeddingBagCollectionSharder, EmbCacheEmbeddingCollectionSharder
from torchrec_embcache.exceptions import UnsupportedError
from torchrec_models import Model

CPU = torch.device("cpu")
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}


def _constrained(_rank: int, world: int, kinds: list[str]) -> str:
    sharders = [EmbCacheEmbeddingBagCollectionSharder(FUSED), EmbCacheEmbeddingCollectionSharder(FUSED)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        constraints={"ta": ParameterConstraints(sharding_types=kinds)},
    )
    model = Model()
    try:
        plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
        DistributedModelParallel(model, device=CPU, sharders=sharders, plan=plan)
    except UnsupportedError as error:
        return str(error)
    return "sharded"


@pytest.mark.parametrize("kind", ["column_wise", "table_row_wise", "table_column_wise", "data_parallel"])
def test_unsupported_sharding_constraint_is_rejected_everywhere(two_ranks, kind):
    for told in two_ranks.run(_constrained, [kind]):
        assert f"table 'ta': sharding_type='{kind}' is not supported yet" in told


@pytest.mark.parametrize("kind", ["column_wise", "table_row_wise", "table_column_wise", "data_parallel"])
def test_torchrec_planner_shows_the_constraint_to_the_sharder(kind):
    """The sharder reads this from the planner's variables, because it is no argument. If this test fails, TorchRec's planner has
    changed.
    """
    planner = EmbeddingEnumerator(
        topology=Topology(world_size=2, compute_device="cpu"),
        batch_size=8,
        constraints={"ta": ParameterConstraints(sharding_types=[kind])},
    )
    try:
        options = planner.enumerate(Model().bags, [EmbCacheEmbeddingBagCollectionSharder(FUSED)])
    except RuntimeError as error:
        pytest.fail(
            "TorchRec's EmbeddingEnumerator does not call sharding_types() from a frame whose `self` has `_constraints` "
            f"and whose `name` is the table's: change _required_sharding_types in distributed/sharders.py ({error})"
        )
    assert {option.sharding_type for option in options if option.name == "ta"} == {kind}
    assert {option.sharding_type for option in options if option.name == "tb"} == {"row_wise", "table_wise"}


def test_a_constraint_that_allows_a_supported_sharding_too_is_met(two_ranks):
    assert two_ranks.run(_constrained, ["column_wise", "row_wise"]) == ["sharded", "sharded"]
