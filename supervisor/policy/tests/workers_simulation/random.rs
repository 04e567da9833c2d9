//! A seeded random number generator (splitmix64).

use std::time::Duration;

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a random number from 0 to `bound - 1`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// Returns a random duration below `bound`, in whole microseconds.
    pub(crate) fn within(&mut self, bound: Duration) -> Duration {
        let micros = u64::try_from(bound.as_micros()).expect("simulated spans are short");
        Duration::from_micros(self.below(micros.max(1)))
    }

    /// Returns a random element of the slice.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        let at = usize::try_from(self.below(of.len() as u64)).expect("it was a usize");
        of[at]
    }
}
