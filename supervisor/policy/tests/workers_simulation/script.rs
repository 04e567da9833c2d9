//! The script of a run, generated from its seed.

use std::time::Duration;

use shadowslice_policy::workers::{HandoverMode, Settings, Timeouts};
use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::{Percent, Sms};

use crate::odds::Odds;
use crate::random::Random;

pub(crate) const MS: Duration = Duration::from_millis(1);

/// The maximum time after which an event of a worker reaches the state machine.
pub(crate) const MAX_LATENCY: Duration = Duration::from_millis(2);

/// The shares that requests choose from, for runs with many and for runs with few different shares.
const SHARES: [u32; 9] = [10, 20, 25, 40, 50, 60, 75, 90, 100];
const FEW_SHARES: [u32; 3] = [20, 60, 100];

/// An event from outside the state machine.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ExternalEvent {
    /// Another share is requested.
    Resize,
    /// The settings change.
    Configure,
    /// An operator holds or releases the share.
    Hold(bool),
    /// The standby must exit, because its memory is needed.
    StandbyRevoked,
    /// The groups of this model move, because other models need the old groups.
    GroupsMove,
    /// A timer fires that belongs to another owner or is outdated.
    StrayTimer,
    /// A request is proved to kill its workers.
    Poison,
    /// A worker is killed with `kill -9`. Its lane may end before its process exits.
    Death(Pick),
    /// A worker hangs or violates the protocol.
    Misbehaviour(Pick),
    /// The worker that serves must exit for the sleep of the model.
    Sleep,
    /// The model must serve again after a sleep.
    Wake,
    Stop,
}

/// The worker that is affected by an event.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pick {
    Routed,
    Other,
}

/// The behaviour of workers in the last part of the run, after all faults and orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Afterwards {
    /// Every start, change and exit succeeds within its time limits.
    Heals,
    /// The state machine receives only the exits of killed workers.
    FallsSilent,
}

/// The script of one run.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) faultless: bool,
    pub(crate) settings: Settings,
    pub(crate) share: Percent,
    /// True if requests repeat the same few shares.
    pub(crate) few_shares: bool,
    pub(crate) held: bool,
    pub(crate) division: Option<Division>,
    /// The numbers of groups that no worker can use, as a bit mask.
    pub(crate) bad_counts: u64,
    /// True if the model's configuration has a fault.
    pub(crate) fault: bool,
    pub(crate) odds: Odds,
    pub(crate) timer_lateness: Duration,
    /// The length of the part of the run in which faults and orders occur.
    pub(crate) span: Duration,
    pub(crate) afterwards: Afterwards,
    pub(crate) happenings: Vec<(Duration, ExternalEvent)>,
}

impl Script {
    /// Returns a random script. Every fourth run has no faults, and all its operations succeed within
    /// their time limits. Even in these runs, events are late or repeated, outdated timers fire, groups
    /// move, and the GPU may have too little memory for standbys.
    pub(crate) fn draw(seed: u64, random: &mut Random) -> Self {
        let faultless = seed.is_multiple_of(4);
        let total = Sms(random.pick(&[16, 20, 46, 132]));
        let handover = random.pick(&[
            HandoverMode::Auto,
            HandoverMode::Auto,
            HandoverMode::InProcess,
            HandoverMode::Shadow,
            HandoverMode::Shadow,
            HandoverMode::Never,
        ]);
        let divides = match handover {
            HandoverMode::Auto => random.percent(60),
            HandoverMode::InProcess => true,
            HandoverMode::Shadow | HandoverMode::Never => false,
        };
        let settings = settings(handover, total, random);
        let longest = random.pick(&[3000 * MS, 5000 * MS, 15_000 * MS, 45_000 * MS]);
        let span = 200 * MS + random.within(longest);
        let odds = Odds::draw(faultless, random);
        let afterwards =
            if !faultless && random.percent(25) { Afterwards::FallsSilent } else { Afterwards::Heals };
        let late = if faultless || random.percent(70) { MAX_LATENCY } else { 300 * MS };
        let bad = !faultless && random.percent(30);
        let few_shares = random.percent(60);
        Self {
            faultless,
            share: share_within(&settings, few_shares, random),
            few_shares,
            settings,
            held: random.percent(5),
            division: divides.then(|| Division::of(total)).flatten(),
            bad_counts: if bad { random.below(1 << 18) } else { 0 },
            fault: !faultless && random.percent(1),
            odds,
            timer_lateness: random.within(late),
            span,
            afterwards,
            happenings: happenings(faultless, span, random),
        }
    }
}

fn settings(handover: HandoverMode, total: Sms, random: &mut Random) -> Settings {
    let percent = |percent| Percent::new(percent).expect("1 to 100");
    let spawn = random.pick(&[200 * MS, 700 * MS]);
    let dwell = random.pick(&[Duration::ZERO, 20 * MS, 500 * MS, 3000 * MS]);
    Settings {
        model: "m".to_owned(),
        min: percent(random.pick(&[1, 10, 20])),
        max: percent(random.pick(&[60, 100, 100])),
        handover,
        standby: random.percent(50),
        timeouts: Timeouts {
            spawn: 20 * MS + random.within(spawn),
            warm: 20 * MS + random.within(400 * MS),
            drain: 20 * MS + random.within(200 * MS),
            dwell: random.within(dwell),
            stop: 20 * MS + random.within(200 * MS),
        },
        policy_acts: random.percent(50),
        on_gpu: random.percent(50),
        reference: WorkerPurpose::Reference,
        sms: (1..=100).map(|share| percent(share).sms_of(total)).collect(),
    }
}

/// Returns a random share within the configured limits.
pub(crate) fn share_within(settings: &Settings, few: bool, random: &mut Random) -> Percent {
    let shares: &[u32] = if few { &FEW_SHARES } else { &SHARES };
    let share = random.pick(shares);
    let share = Percent::new(share).expect("1 to 100");
    share.clamp(settings.min, settings.max)
}

fn happenings(faultless: bool, span: Duration, random: &mut Random) -> Vec<(Duration, ExternalEvent)> {
    let mut happenings = Vec::new();
    // Events are concentrated on a few points in time, so that some events coincide.
    let shortly = random.pick(&[200 * MS, 1500 * MS, span]).min(span);
    let moments: Vec<Duration> = (0..4).map(|_| random.within(span - shortly + MS)).collect();
    let mut some = |many: u64, happening, random: &mut Random| {
        for _ in 0..random.below(many) {
            happenings.push((random.pick(&moments) + random.within(shortly), happening));
        }
    };
    let busy = random.pick(&[3, 6, 13]);
    some(busy, ExternalEvent::Resize, random);
    some(4, ExternalEvent::StrayTimer, random);
    some(3, ExternalEvent::GroupsMove, random);
    some(3, ExternalEvent::Configure, random);
    some(3, ExternalEvent::StandbyRevoked, random);
    some(2, ExternalEvent::Hold(true), random);
    some(2, ExternalEvent::Hold(false), random);
    if random.percent(30) {
        some(4, ExternalEvent::Sleep, random);
        some(4, ExternalEvent::Wake, random);
    }
    if !faultless {
        let many = random.pick(&[1, 3, 6]);
        some(many, ExternalEvent::Death(Pick::Routed), random);
        some(many, ExternalEvent::Death(Pick::Other), random);
        some(many, ExternalEvent::Misbehaviour(Pick::Routed), random);
        some(many, ExternalEvent::Misbehaviour(Pick::Other), random);
        some(2, ExternalEvent::Poison, random);
    }
    if random.percent(30) {
        some(2, ExternalEvent::Stop, random);
    }
    happenings
}
