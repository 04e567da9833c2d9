//! The simulated processes of a run, and their next steps.

use shadowslice_policy::workers::{Launch, LifecycleEvent};
use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::boot::{
    BootRefusal, PartitionProof, ProvenPartitions, WarmTime, WarmUpReport, WorkerPurpose,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;

use crate::fate::{Boot, Fate};
use crate::script::{MS, Script};
use crate::world::{World, WorldEvent};

/// A simulated worker process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) launch: Launch,
    pub(crate) fate: Fate,
    /// The partition with which the worker was started.
    pub(crate) asked: Option<Groups>,
    pub(crate) alive: bool,
    /// True if the worker sends no further messages, because it hangs or is ending.
    pub(crate) mute: bool,
    /// True if the worker has a lane.
    pub(crate) attached: bool,
    pub(crate) killed: bool,
    pub(crate) exit_told: bool,
    pub(crate) drains: u64,
}

/// The next step of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ProcessStep {
    Hello,
    Warm,
    Drained(u64),
    Prepared(Groups, bool),
    Answers,
    Dies,
    Ends,
}

/// Returns true if no worker can prepare this partition. The result for a partition never changes.
fn is_bad(script: &Script, groups: Groups) -> bool {
    let bad_count = groups.count() < 18 && script.bad_counts >> groups.count() & 1 == 1;
    let chance = groups.bits().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    bad_count || chance % 100 < script.odds.no_partition
}

/// Returns the proofs of a worker that was started with the partition `asked`.
fn proven(script: &Script, asked: Groups) -> Option<ProvenPartitions> {
    let total = script.division.as_ref()?.count();
    let bad = |count| count < total && script.bad_counts >> count & 1 == 1;
    let counts: Vec<_> = (1..=total)
        .map(|count| PartitionProof {
            groups: count,
            result: if bad(count) { Err("scripted".to_owned()) } else { Ok(times_on(count, total)) },
        })
        .collect();
    (1..total).any(|count| !bad(count)).then_some(())?;
    let mut parts = (1..=asked.count()).rev().map(|count| asked.iter().take(count).collect());
    let ready = if asked == Groups::WHOLE { None } else { parts.find(|part| !is_bad(script, *part)) };
    Some(ProvenPartitions { counts, ready: ready.unwrap_or(Groups::WHOLE) })
}

/// Returns the batch times on a number of groups. The larger batch size runs only on even numbers of
/// groups and on the whole GPU.
fn times_on(count: usize, total: usize) -> Vec<WarmTime> {
    let fits = count == total || count.is_multiple_of(2);
    let sizes = if fits { &[1, 2][..] } else { &[1] };
    sizes.iter().map(|&rows| WarmTime { rows, took: MS, error: 0.0 }).collect()
}

impl World {
    /// Runs the next step of a process.
    pub(crate) fn goes_on(&mut self, worker: WorkerId, next: ProcessStep) {
        let Some(process) = self.processes.get(&worker).filter(|process| process.alive) else { return };
        let mute = process.mute;
        match next {
            ProcessStep::Ends => self.end(worker),
            ProcessStep::Dies if self.is_troubled() => self.die(worker),
            ProcessStep::Dies => {}
            _ if mute => {}
            ProcessStep::Hello => self.hello(worker),
            ProcessStep::Warm => self.warms_up(worker),
            ProcessStep::Drained(drain) if drain == process.drains => {
                self.say(worker, LifecycleEvent::Drained(worker))
            }
            ProcessStep::Drained(_) => {}
            ProcessStep::Prepared(groups, fails) => {
                let bad = fails || is_bad(&self.script, groups);
                let result = if bad { Err("scripted".to_owned()) } else { Ok(()) };
                self.say(
                    worker,
                    LifecycleEvent::Prepared { worker, prepared: PartitionReply { groups, result } },
                );
            }
            ProcessStep::Answers => self.say(worker, LifecycleEvent::FirstAnswer(worker)),
        }
    }

    fn hello(&mut self, worker: WorkerId) {
        if self.processes[&worker].fate.early {
            return self.fails_to_boot(worker);
        }
        self.say(worker, LifecycleEvent::Connected(worker));
    }

    fn warms_up(&mut self, worker: WorkerId) {
        let process = &self.processes[&worker];
        let (fate, asked) = (process.fate.clone(), process.asked);
        if fate.boot != Boot::Succeeds {
            return self.fails_to_boot(worker);
        }
        if process.launch.purpose != WorkerPurpose::Serve {
            return self.say(worker, LifecycleEvent::ReferenceWritten { worker, result: Ok(()) });
        }
        let partitions = asked.and_then(|asked| proven(&self.script, asked));
        if asked.is_some() && partitions.is_none() {
            let refusal = BootRefusal::NoPartitions("scripted".to_owned());
            return self.refuse(worker, refusal);
        }
        let times = times_on(1, 1);
        self.say(
            worker,
            LifecycleEvent::Warmed {
                worker,
                warmed: Box::new(WarmUpReport { times, partitions, ..WarmUpReport::default() }),
                asked,
            },
        );
        if let Some(life) = fate.dies {
            self.schedule(life, WorldEvent::Process(worker, ProcessStep::Dies));
        }
    }

    fn fails_to_boot(&mut self, worker: WorkerId) {
        match self.processes[&worker].fate.boot.clone() {
            Boot::Succeeds | Boot::Hangs => self.process(worker).mute = true,
            Boot::Dies => self.end(worker),
            Boot::Misbehaves => self.misbehave(worker),
            Boot::Refuses(refusal) => self.refuse(worker, refusal),
            Boot::CannotKeep => {
                let result = Err("scripted".to_owned());
                self.say(worker, LifecycleEvent::ReferenceWritten { worker, result });
            }
        }
    }

    fn refuse(&mut self, worker: WorkerId, refusal: BootRefusal) {
        self.say(worker, LifecycleEvent::Refused { worker, refusal });
        self.process(worker).mute = true;
        if !self.process(worker).fate.deaf {
            let exit = self.process(worker).fate.exit;
            self.schedule(exit, WorldEvent::Process(worker, ProcessStep::Ends));
        }
    }

    pub(crate) fn misbehave(&mut self, worker: WorkerId) {
        self.say(worker, LifecycleEvent::Misbehaved { worker, why: "scripted".to_owned() });
        self.process(worker).mute = true;
    }

    /// Makes a process die. Its lane may end before the process exits.
    pub(crate) fn die(&mut self, worker: WorkerId) {
        let (attached, leads) = (self.process(worker).attached, self.process(worker).fate.lane_leads);
        match leads.filter(|_| attached) {
            Some(lead) => {
                let idle = self.random.percent(50);
                self.say(worker, LifecycleEvent::LaneEnded { worker, idle });
                self.process(worker).mute = true;
                self.schedule(lead, WorldEvent::Process(worker, ProcessStep::Ends));
            }
            None => self.end(worker),
        }
    }

    /// Ends a process. The exit is reported once, after all other events of the process.
    fn end(&mut self, worker: WorkerId) {
        let idle = self.random.percent(50);
        let process = self.process(worker);
        process.alive = false;
        let fact = LifecycleEvent::Exited { worker, status: "exit status: 1".to_owned(), idle };
        let latency = process.fate.latency;
        self.schedule(latency, WorldEvent::News(worker, fact));
    }

    /// Sends an event, which may be lost or repeated later.
    fn say(&mut self, worker: WorkerId, fact: LifecycleEvent) {
        let latency = self.process(worker).fate.latency;
        if self.random.percent(self.script.odds.repeated) {
            let later = latency + self.random.within(300 * MS);
            self.schedule(later, WorldEvent::News(worker, fact.clone()));
        }
        let lost = self.is_troubled() && self.random.percent(self.script.odds.lost);
        if !lost {
            self.schedule(latency, WorldEvent::News(worker, fact));
        }
    }
}
