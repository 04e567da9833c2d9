"""Tests that the fleet never removes a last copy, and recovers from random events."""

import unittest

from storm import Storm, storm

SEEDS = 40
STEPS, RATE = 150, 0.25  # the steps of a storm, and the events per step
CALM = 1300  # steps, longer than the longest pause after failures


class Storms(unittest.TestCase):
    def test_no_sequence_of_events_removes_a_serving_copy_and_each_settles(self) -> None:
        for seed in range(SEEDS):
            there = storm(seed)
            there.steps(20)
            for _ in range(STEPS):
                if there.chance.random() < RATE:
                    there.happens()
                there.step()
            there.calms()
            for _ in range(CALM):
                there.step()
                if self.settled(there):
                    break
            with self.subTest(seed=seed):
                self.assertEqual(there.faults, [])
                self.assertTrue(self.settled(there), there)

    def settled(self, there: Storm) -> bool:
        """Checks that the world is in the desired state and that the fleet sends no actions."""
        actions = there.actions
        if actions.apply or actions.fetch or actions.drain or actions.undrain:
            return False
        names = {name for observed in there.hosts.values() for name in observed.copies}
        return names == there.spec.models.keys() and all(
            there.table(name) == set(there.memory.placement[name])
            and there.serving(name)
            == there.published(name)
            == {on.host for on in there.table(name)}
            for name in names
        )


if __name__ == "__main__":
    unittest.main()
