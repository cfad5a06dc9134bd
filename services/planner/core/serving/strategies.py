"""The ways to serve while a model's weights spread, by the names that users give them."""

from collections.abc import Mapping

from services.planner.core.serving.loading import ServingStrategy
from services.planner.core.serving.pipelines import pipelines
from services.planner.core.serving.pools import pools, pools_of_targets
from services.planner.core.serving.stop_the_world import stop_the_world
from services.planner.core.serving.zigzag import live_scaling

SERVING: Mapping[str, ServingStrategy] = {
    "none": stop_the_world,
    "pipelines": pipelines,
    "pools": pools,
    "pools-only-targets": pools_of_targets,
    "zigzag": live_scaling,
}
