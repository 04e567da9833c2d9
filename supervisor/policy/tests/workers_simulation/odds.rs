//! The probabilities of faults in a run.

use crate::random::Random;

/// The probability of each fault, in percent.
#[derive(Debug, Default)]
pub(crate) struct Odds {
    /// The probability that a start fails before a process exists.
    pub(crate) not_started: u64,
    /// The probability that a start fails after the process was created.
    pub(crate) bad_boot: u64,
    /// The probability that a warm worker soon dies.
    pub(crate) short_life: u64,
    /// The probability that a phase is slow: it takes up to 1.5 times its time limit.
    pub(crate) slow: u64,
    pub(crate) deaf: u64,
    pub(crate) immortal: u64,
    /// The probability that an event is lost.
    pub(crate) lost: u64,
    /// The probability that an event is repeated later, which is not a fault.
    pub(crate) repeated: u64,
    /// The probability that a partition cannot be prepared.
    pub(crate) no_partition: u64,
    /// The probability that a worker does not reply to the order to prepare a partition.
    pub(crate) no_answer: u64,
    /// The probability that the GPU has too little memory for a standby.
    pub(crate) no_room: u64,
}

impl Odds {
    pub(crate) fn draw(faultless: bool, random: &mut Random) -> Self {
        let repeated = random.pick(&[0, 10, 40]);
        let no_room = random.pick(&[0, 0, 30]);
        if faultless {
            return Self { repeated, no_room, ..Self::default() };
        }
        // Half of the runs have low probabilities, so that more changes complete.
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
