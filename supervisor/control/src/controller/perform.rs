//! The actions of the state machine. This module performs them and makes no decisions.

use shadowslice_policy::workers::{Action, LifecycleEvent};
use shadowslice_shared::batch::Command;
use shadowslice_shared::ids::WorkerId;

use super::events::Controller;
use super::memory::{MemoryOwner, ServingWorker};
use super::reports::WaitReason;
use crate::process::Worker;

impl Controller {
    /// Performs an action. Returns the event that the action causes immediately.
    pub(super) fn perform(&mut self, action: Action) -> Option<LifecycleEvent> {
        tracing::debug!(model = self.model.name, ?action, "decided");
        match action {
            Action::Start(launch) => return self.start(launch),
            Action::Load(worker) => self.with_process(worker, Worker::warm),
            Action::Attach { worker, share, slice, sizes } => self.attach(worker, share, slice, sizes),
            Action::Route(worker) => {
                self.with_process(worker, Worker::serve);
                let serving = self.processes.get(&worker).map(|process| {
                    let memory = process.memory.unwrap_or_default();
                    match process.is_member {
                        true => ServingWorker::Member { bytes: memory.scratch },
                        false => ServingWorker::Process { pid: process.pid, brought: memory.brought },
                    }
                });
                self.account.serves(serving);
                self.pipeline.route(worker);
                self.pipeline.open();
            }
            Action::Shut(why) => self.pipeline.shut(&why),
            Action::Drain(worker) => self.pipeline.drain(worker),
            Action::Requeue(worker) => self.pipeline.requeue(worker),
            Action::Condemn(worker) => self.pipeline.condemn(worker),
            Action::Hurry(worker) => self.with_process(worker, Worker::serve),
            Action::Stop(worker) => self.with_process(worker, Worker::stop),
            Action::StayAwake(worker) => self.pipeline.stay_awake(worker),
            Action::Kill(worker, why) => {
                tracing::error!(
                    model = self.model.name,
                    pid = self.pid(worker),
                    why,
                    "killing a worker that failed or did not exit in time; if the model needs another worker, the supervisor starts one"
                );
                self.with_process(worker, |process| process.kill());
                self.pipeline.worker_killed();
            }
            Action::AskGroups { count, cannot } => {
                let tenancy = self.tenancy.as_ref()?;
                return Some(LifecycleEvent::Groups(tenancy.request(count, cannot)));
            }
            Action::Prepare(worker, groups) => self.pipeline.command(worker, Command::Prepare(groups)),
            Action::Forget(worker, groups) => self.pipeline.command(worker, Command::Forget(groups)),
            Action::Move { worker, share, slice } => self.pipeline.move_to(worker, share, &slice),
            Action::StandbyExists(stands) => self.account.stands(stands, self.now()),
            Action::Keep(worker) => return self.keep(worker),
            Action::NeedsShadows => {
                self.tenancy = None;
                self.account.update(MemoryOwner::new(&self.model, self.workers.needs_shadows()));
            }
            Action::MeasureStall { outage: false } => self.pipeline.begin_stall(),
            Action::MeasureStall { outage: true } => self.pipeline.begin_stall_at_outage(),
            Action::AwaitEffect(worker, request) => self.records.await_effect(worker, request, self.now()),
            Action::Report(report) => self.report(report),
        }
        None
    }

    fn with_process(&mut self, worker: WorkerId, change: impl FnOnce(&mut Worker)) {
        if let Some(process) = self.processes.get_mut(&worker) {
            change(process);
        }
    }

    /// Makes a worker that has served the standby, if there is enough memory.
    fn keep(&mut self, worker: WorkerId) -> Option<LifecycleEvent> {
        tracing::info!(
            model = self.model.name,
            pid = self.pid(worker),
            "the replaced worker becomes the warm standby"
        );
        // The worker replaces the last standby, which may have had to yield.
        self.account.stands(false, self.now());
        self.account.stands(true, self.now());
        let no_room = self.room_to_stand(true).err()?;
        self.waits.standby = Some(WaitReason::Memory);
        Some(LifecycleEvent::StandbyRevoked(no_room.to_string()))
    }
}
