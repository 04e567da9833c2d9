//! The fate of one worker: its random delays and faults.

use std::time::Duration;

use shadowslice_policy::workers::{Launch, StartFailure};
use shadowslice_shared::boot::BootRefusal;

use crate::random::Random;
use crate::script::{MAX_LATENCY, MS, Script};

/// The outcome of a worker's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Boot {
    Succeeds,
    /// The worker sends no further messages.
    Hangs,
    Refuses(BootRefusal),
    Dies,
    Misbehaves,
    /// The supervisor cannot keep the reference answers.
    CannotKeep,
}

/// The random delays and faults of one worker.
#[derive(Debug, Clone)]
pub(crate) struct Fate {
    pub(crate) not_started: Option<StartFailure>,
    pub(crate) boot: Boot,
    /// True if the outcome in `boot` occurs before the worker connects.
    pub(crate) early: bool,
    pub(crate) spawn: Duration,
    pub(crate) warm: Duration,
    pub(crate) drain: Duration,
    pub(crate) exit: Duration,
    /// The time from the end of the warm-up until the worker dies, or `None` if it does not die.
    pub(crate) dies: Option<Duration>,
    /// The time from the end of the lane until the exit, or `None` if the lane does not end before the
    /// exit.
    pub(crate) lane_leads: Option<Duration>,
    /// True if the worker ignores the order to exit.
    pub(crate) deaf: bool,
    /// True if the worker survives a kill.
    pub(crate) immortal: bool,
    pub(crate) latency: Duration,
}

impl Fate {
    /// Returns a random fate. `troubled` is true if faults may occur.
    pub(crate) fn draw(
        script: &Script,
        launch: &Launch,
        partitioned: bool,
        troubled: bool,
        random: &mut Random,
    ) -> Self {
        let (odds, timeouts) = (&script.odds, script.settings.timeouts);
        let mut odd = |chance| troubled && random.percent(chance);
        let (fails, badly, early) = (odd(odds.not_started), odd(odds.bad_boot), odd(30));
        let (deaf, immortal, slow) = (odd(odds.deaf), odd(odds.immortal), odd(odds.slow));
        let (dies, leads) = (odd(odds.short_life), odd(50));
        // A reference worker fails less often than other workers, so that most runs have reference
        // answers.
        let badly = badly && (!launch.purpose.is_reference() || random.percent(30));
        let early = early && badly;
        let mut below =
            |limit: Duration| random.within(if slow { limit * 3 / 2 } else { limit - 3 * MAX_LATENCY });
        let (spawn, warm) = (below(timeouts.spawn), below(timeouts.warm));
        let (drain, exit) = (below(timeouts.drain), below(timeouts.stop));
        // Some standbys start slowly, so that events occur during their starts.
        let long = launch.standby && random.percent(40);
        let warm = if long { warm.max(timeouts.warm - 5 * MAX_LATENCY) } else { warm };
        let life = random.pick(&[10 * MS, 500 * MS, 20_000 * MS]);
        Self {
            not_started: not_started(script, launch, fails, troubled, random),
            boot: if badly { bad_boot(launch, partitioned, random) } else { Boot::Succeeds },
            early,
            spawn,
            warm,
            drain,
            exit,
            dies: dies.then(|| random.within(life)),
            lane_leads: leads.then(|| random.within(timeouts.stop * 3 / 2)),
            deaf,
            immortal,
            latency: random.within(MAX_LATENCY),
        }
    }
}

fn not_started(
    script: &Script,
    launch: &Launch,
    fails: bool,
    before_the_end: bool,
    random: &mut Random,
) -> Option<StartFailure> {
    let why = "scripted".to_owned();
    if launch.standby && (before_the_end || script.faultless) && random.percent(script.odds.no_room) {
        return Some(StartFailure::NoRoomForStandby(why));
    }
    fails.then(|| match random.below(3) {
        0 => StartFailure::Passing { why, memory_expected: true },
        1 => StartFailure::Passing { why, memory_expected: false },
        _ => StartFailure::Failed(why),
    })
}

fn bad_boot(launch: &Launch, partitioned: bool, random: &mut Random) -> Boot {
    let why = "scripted".to_owned();
    match random.below(8) {
        0 => Boot::Hangs,
        1 => Boot::Dies,
        2 => Boot::Misbehaves,
        3 if launch.purpose.is_reference() => Boot::CannotKeep,
        4 if launch.purpose.is_reference() => Boot::Refuses(BootRefusal::Model(why)),
        5 if launch.purpose.is_reference() => Boot::Refuses(BootRefusal::NoOperator(why)),
        3 | 4 if partitioned => Boot::Refuses(BootRefusal::NoPartitions(why)),
        3 | 4 => Boot::Refuses(BootRefusal::Proof { size: 1, why }),
        5 => Boot::Refuses(BootRefusal::WarmUp { size: 1, why }),
        _ => Boot::Refuses(BootRefusal::Setup(why)),
    }
}
