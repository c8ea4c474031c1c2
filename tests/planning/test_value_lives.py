"""What values between layers take in stages, by who makes and reads them."""

from roundpipe.core.layers import CarriedValue, LayerCost
from roundpipe.planning.stage_costs import StageCosts


def test_values_count_where_they_are_read():
    """A skip connection from the first layer to the fourth, and one to the fourth and the fifth."""
    lives = [
        (CarriedValue(-1, (0,), 1), CarriedValue(0, (1,), 2, 2), CarriedValue(0, (3,), 100, 100)),
        (CarriedValue(1, (2,), 4, 4), CarriedValue(1, (3, 4), 1000, 1000)),
        (CarriedValue(2, (3,), 8, 8),),
        (CarriedValue(3, (4,), 16, 16),),
        (),
    ]
    layers = [LayerCost(workspace_bytes=10, temporary_bytes=5000, gradient_bytes=5, values=each) for each in lives]
    costs = StageCosts(layers)
    assert costs.forward(2, 3).working_bytes == 10 + 4 + (4 + 8), "it takes none of the skip connections"
    assert costs.forward(1, 3).working_bytes == 10 + 2 + (4 + 1000) + (2 + 1000 + 8)
    assert costs.forward(2, 3).carried.left == 4 + 8
    fused = StageCosts(layers).fused(3, 5).carried
    assert fused.present == 100 + 1000 + 8 and fused.left == 2 * fused.present
    # a gradient of each value that it makes is counted with its own layer; of the larger, two and their sum
    assert costs.backward(1, 2, (1, 2, 4)).working_bytes == 5000 + 2 * 1000 + 2 + (2 + 2 * 1000 + 4 + 2)
    assert costs.backward(1, 2, (1, 2, 3)).working_bytes == 5000 + 2 + (2 + 1000 + 4 + 2)
    kept = StageCosts(layers, "layer").backward(1, 2, (1, 2, 4))
    assert kept.working_bytes == costs.backward(1, 2, (1, 2, 4)).working_bytes


def test_a_backward_in_which_nothing_runs_needs_no_values():
    frozen = [LayerCost(activation_bytes=100, values=(CarriedValue(layer, (layer + 1,), 3),)) for layer in range(3)]
    trained = LayerCost(activation_bytes=100, gradient_bytes=5, values=(CarriedValue(3, (4,), 3, 3),))
    costs = StageCosts([*frozen, trained, LayerCost(activation_bytes=100)])
    assert costs.backward(0, 3).own_bytes == 0 == costs.backward(0, 3).carried.left
    assert costs.backward(2, 4).own_bytes > 2 * 100


def test_a_forward_holds_the_values_that_live_inside_of_its_stage():
    """As of a U-Net: skip connections that are made and read within one stage, whose cuts are narrow."""
    costs = [LayerCost(workspace_bytes=10, carry_bytes=carry) for carry in (1, 50, 100, 50, 1)]
    assert StageCosts(costs).forward(0, 5).working_bytes == 10 + 100 + 1 + 2 * 1
    assert StageCosts(costs).forward(0, 1).working_bytes == 10 + 1 + 2 * 1
