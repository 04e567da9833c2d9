//! The likelihood of faults.

use crate::random::Random;

/// The likelihood of each fault, in percent.
#[derive(Debug, Default)]
pub(crate) struct Odds {
    /// The start fails before the process exists.
    pub(crate) not_started: u64,
    /// The start fails later.
    pub(crate) bad_boot: u64,
    /// A warm worker dies soon.
    pub(crate) short_life: u64,
    /// A phase takes up to half as long again as its limit.
    pub(crate) slow: u64,
    pub(crate) deaf: u64,
    pub(crate) immortal: u64,
    /// News is lost.
    pub(crate) lost: u64,
    /// News arrives again later. This is not a fault.
    pub(crate) repeated: u64,
    /// A partition cannot be prepared.
    pub(crate) no_partition: u64,
    /// The worker does not answer about a partition.
    pub(crate) no_answer: u64,
    /// The GPU has too little memory for a standby.
    pub(crate) no_room: u64,
}

impl Odds {
    pub(crate) fn draw(faultless: bool, random: &mut Random) -> Self {
        let repeated = random.pick(&[0, 10, 40]);
        let no_room = random.pick(&[0, 0, 30]);
        if faultless {
            return Self { repeated, no_room, ..Self::default() };
        }
        // If every worker fails, few changes make progress.
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
