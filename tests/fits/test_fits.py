"""Some cases of the campaigns of budgets and of out of memory: `tests.campaigns` runs them all."""

from __future__ import annotations

import pytest

from tests.fits import budgets, phases
from tests.fits.models import MODELS, Setting

VIT, DECODER = MODELS[5], MODELS[6]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "setting",
    [
        Setting(VIT, 1_600_000, is_async=True),
        Setting(DECODER, 1_292_000),
        pytest.param(Setting(VIT, 630_641), marks=pytest.mark.long),
        pytest.param(Setting(MODELS[4], 324_797), marks=pytest.mark.long),
        pytest.param(Setting(MODELS[4], 1_200_000, is_async=True), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_device_of_any_size_trains_or_says_what_would(setting: Setting) -> None:
    problems, _ = budgets.examine(setting)
    assert not problems


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "place", [place if place == "backward" else pytest.param(place, marks=pytest.mark.long) for place in phases.PLACES]
)
def test_out_of_memory_at_a_place_of_a_step_is_recovered_from(place: str) -> None:
    setting = Setting(VIT, 1_400_000)
    places = phases.places_of(setting)
    position = len(places) - 1 - places[::-1].index(place)
    problems, kind = phases.examine(setting, position)
    assert not problems and kind == "trained"
