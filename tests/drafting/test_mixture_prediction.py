from __future__ import annotations

import numpy as np

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree


def test_the_place_in_the_prediction_is_found_by_more_than_the_last_eight_tokens():
    shared = list(range(300, 312))
    prediction = np.array([100, *shared, 50, 51, 200, *shared, 60, 61], np.int32)
    drafter = MixtureDrafter(recycling=False)
    drafter.start(np.array([1, 2, 3], np.int32), prediction)
    for emitted in ([999], [200, *shared]):
        drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array(emitted, np.int32)))
    drafter._catch_up()
    position, matched = drafter.prediction.cursors[0, :2]
    assert prediction[position] == 60
    assert matched == len(shared) + 1
