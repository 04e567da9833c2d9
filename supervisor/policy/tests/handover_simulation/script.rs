//! What one run has in store, drawn from its seed.

use std::time::Duration;

use shadowslice_policy::handover::{Fact, Side, Timeouts};

use crate::random::Random;

const MS: Duration = Duration::from_millis(1);

/// The longest that news of a side, or a timer, takes to reach the machine.
pub(crate) const MAX_LATENCY: Duration = Duration::from_millis(2);

/// Something that comes from outside.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Happening {
    /// `kill -9`.
    Death(Side),
    /// The shadow hangs, breaks the protocol or answers wrong, if it lives.
    Misbehaviour,
    Cancel,
    Reclaim,
    Adopt,
    /// A timer of another owner, or one that was never cancelled.
    StrayTimer,
}

/// What the shadow's start-up comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartUp {
    Succeeds,
    /// There is not even a process.
    CannotSpawn,
    /// The shadow reports a failure instead of hello.
    FailsBeforeHello,
    /// The shadow reports a failure instead of becoming warm.
    FailsBeforeWarm,
}

/// What there is of the shadow when the hand-over begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beginning {
    Nothing,
    /// It was spawned so long ago.
    Spawning {
        behind: Duration,
    },
    /// It said hello so long ago.
    Warming {
        behind: Duration,
    },
    /// It stands ready.
    Standing,
}

impl Beginning {
    /// How long ago its present phase began.
    pub(crate) fn behind(self) -> Duration {
        match self {
            Self::Spawning { behind } | Self::Warming { behind } => behind,
            Self::Nothing | Self::Standing => Duration::ZERO,
        }
    }
}

/// One run. Arrays are indexed by side, the incumbent first.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) faultless: bool,
    pub(crate) timeouts: Timeouts,
    pub(crate) incumbent_alive: bool,
    pub(crate) shadow: Beginning,
    pub(crate) start_up: StartUp,
    /// How long things take.
    pub(crate) spawn: Duration,
    pub(crate) warm: Duration,
    pub(crate) drain: Duration,
    pub(crate) exit: [Duration; 2],
    pub(crate) restart: Duration,
    /// How long news of a side takes to reach the machine.
    pub(crate) latency: [Duration; 2],
    pub(crate) timer_lateness: Duration,
    /// Does not exit when asked.
    pub(crate) deaf: [bool; 2],
    /// Does not even die when killed, within any time.
    pub(crate) immortal: [bool; 2],
    /// Chances in percent that what a side says never arrives, or arrives again later.
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
    pub(crate) happenings: Vec<(Duration, Happening)>,
}

impl Script {
    /// Every even seed is a run without faults: everything succeeds in time. But news arrives late
    /// or twice, old timers fire, and the parked incumbent may be reclaimed or adopted.
    pub(crate) fn draw(seed: u64, random: &mut Random) -> Self {
        let faultless = seed.is_multiple_of(2);
        let timeouts = Timeouts {
            spawn: 10 * MS + random.within(200 * MS),
            warm: 10 * MS + random.within(500 * MS),
            drain: 10 * MS + random.within(100 * MS),
            dwell: random.within(300 * MS),
            stop: 10 * MS + random.within(100 * MS),
        };
        let mut odds = |chance| !faultless && random.percent(chance);
        let (deaf, immortal) = ([odds(25), odds(25)], [odds(10), odds(10)]);
        let (incumbent_alive, slow) = (!odds(10), odds(30));
        let lost = if odds(30) { 30 } else { 0 };
        let start_up = match random.below(12) {
            0 if !faultless => StartUp::CannotSpawn,
            1 if !faultless => StartUp::FailsBeforeHello,
            2 if !faultless => StartUp::FailsBeforeWarm,
            _ => StartUp::Succeeds,
        };
        // In time: the news arrives before the timeout. Slow: it may or may not.
        let mut below =
            |limit: Duration| random.within(if slow { limit * 3 / 2 } else { limit - 2 * MAX_LATENCY });
        let (spawn, warm, drain) = (below(timeouts.spawn), below(timeouts.warm), below(timeouts.drain));
        let exit = [below(timeouts.stop), below(timeouts.stop)];
        let restart = random.within(200 * MS);
        let latency = [random.within(MAX_LATENCY), random.within(MAX_LATENCY)];
        let timer_lateness = random.within(MAX_LATENCY);
        let window = spawn + warm + drain + timeouts.dwell + 2 * timeouts.stop;
        let happenings = happenings(faultless, window, random);
        let repeated = random.below(40);
        let shadow = match random.below(10) {
            // No hand-over goes from a dead worker to one that stands ready: that one has taken
            // over by then.
            0..3 if incumbent_alive => Beginning::Standing,
            3 | 4 if start_up != StartUp::CannotSpawn => {
                Beginning::Spawning { behind: random.within(spawn.min(timeouts.spawn)) }
            }
            5 | 6 if matches!(start_up, StartUp::Succeeds | StartUp::FailsBeforeWarm) => {
                Beginning::Warming { behind: random.within(warm.min(timeouts.warm)) }
            }
            _ => Beginning::Nothing,
        };
        Self {
            faultless,
            timeouts,
            incumbent_alive,
            shadow,
            start_up,
            spawn,
            warm,
            drain,
            exit,
            restart,
            latency,
            timer_lateness,
            deaf,
            immortal,
            lost,
            repeated,
            happenings,
        }
    }

    /// When the run must be over: every phase as long as it may be, and every timer late.
    pub(crate) fn bound(&self) -> Duration {
        let Timeouts { spawn, warm, drain, dwell, stop } = self.timeouts;
        spawn + warm + drain + dwell + 2 * stop + 6 * MAX_LATENCY
    }
}

fn happenings(faultless: bool, window: Duration, random: &mut Random) -> Vec<(Duration, Happening)> {
    let mut happenings = Vec::new();
    for _ in 0..random.below(4) {
        happenings.push((random.within(window), Happening::StrayTimer));
    }
    if random.percent(20) {
        happenings.push((random.within(window), Happening::Reclaim));
    }
    if random.percent(20) {
        happenings.push((random.within(window), Happening::Adopt));
    }
    let faults = if faultless { 0 } else { random.below(4) };
    for _ in 0..faults {
        let fault = match random.below(5) {
            0 | 1 => Happening::Death(Side::Incumbent),
            2 => Happening::Death(Side::Shadow),
            3 => Happening::Misbehaviour,
            _ => Happening::Cancel,
        };
        happenings.push((random.within(window), fault));
    }
    happenings
}

/// What the machine is told about the happening, if anything.
impl Happening {
    pub(crate) fn fact(self) -> Option<Fact> {
        match self {
            Self::Misbehaviour => Some(Fact::Misbehaved),
            Self::Cancel => Some(Fact::Cancel),
            Self::Reclaim => Some(Fact::Reclaim),
            Self::Adopt => Some(Fact::Adopt),
            Self::Death(_) | Self::StrayTimer => None,
        }
    }
}
