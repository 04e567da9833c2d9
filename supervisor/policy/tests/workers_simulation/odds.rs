//! How likely which faults are.

use crate::random::Random;

/// How likely which faults are, in percent.
#[derive(Debug, Default)]
pub(crate) struct Odds {
    /// A start fails before there is a process.
    pub(crate) not_started: u64,
    /// A start fails later.
    pub(crate) bad_boot: u64,
    /// A warm worker dies before long.
    pub(crate) short_life: u64,
    /// Takes up to half as long again as it may.
    pub(crate) slow: u64,
    pub(crate) deaf: u64,
    pub(crate) immortal: u64,
    /// News is lost; these are no faults: it is told again later, or the timer fires late.
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
    /// A partition cannot be made ready, or the worker says nothing about it.
    pub(crate) no_partition: u64,
    pub(crate) no_answer: u64,
    /// There is no memory for a worker that stands.
    pub(crate) no_room: u64,
}

impl Odds {
    pub(crate) fn draw(faultless: bool, random: &mut Random) -> Self {
        let repeated = random.pick(&[0, 10, 40]);
        let no_room = random.pick(&[0, 0, 30]);
        if faultless {
            return Self { repeated, no_room, ..Self::default() };
        }
        // Where each worker fails, few changes get far.
        if random.percent(50) {
            let mut low = |chances: &[u64]| random.pick(chances);
            return Self {
                not_started: low(&[0, 5, 15]),
                bad_boot: low(&[0, 5, 15]),
                short_life: low(&[0, 5, 20]),
                slow: low(&[0, 0, 10]),
                deaf: low(&[0, 0, 25]),
                immortal: low(&[0, 0, 15]),
                lost: low(&[0, 0, 5]),
                no_partition: low(&[0, 10, 30]),
                no_answer: low(&[0, 0, 5]),
                repeated,
                no_room,
            };
        }
        Self {
            not_started: random.pick(&[0, 5, 30, 60]),
            bad_boot: random.pick(&[0, 10, 40, 95]),
            short_life: random.pick(&[0, 20, 90]),
            slow: random.pick(&[0, 0, 20]),
            deaf: random.pick(&[0, 25]),
            immortal: random.pick(&[0, 0, 15]),
            lost: random.pick(&[0, 0, 20]),
            repeated,
            no_partition: random.pick(&[0, 10, 50, 95]),
            no_answer: random.pick(&[0, 0, 10]),
            no_room,
        }
    }
}
