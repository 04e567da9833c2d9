//! An upgrade, as the supervisor that serves executes it.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_control::controller;
use shadowslice_control::host::RunDir;
use shadowslice_control::models::{ModelSet, PersistedState};
use shadowslice_datapath::phase::Phase;
use shadowslice_datapath::readiness::HostState;
use shadowslice_datapath::sockets::PassableSocket;
use shadowslice_ingress::SharedMemory;
use shadowslice_operations::admin::{AdminContext, Upgrade};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use crate::messages::{FinalState, Instruction, Progress, described};
use crate::successor::Successor;

/// The parts of this supervisor that an upgrade hands over.
pub struct Succession<'a> {
    pub program: &'a Path,
    pub config: &'a Path,
    pub run_dir: &'a RunDir,
    pub sockets: Vec<PassableSocket>,
    pub memory: Arc<SharedMemory>,
    pub admin: Arc<AdminContext>,
    pub phase: watch::Sender<Phase>,
    /// The maximum time until a model of the next supervisor serves.
    pub within: Duration,
}

impl Succession<'_> {
    /// Executes the commands to upgrade. Returns when another supervisor serves, with the sender for the
    /// reply. If an upgrade fails, replies that here, and waits for the next command. Dropping the future
    /// kills a process that does not serve yet.
    pub async fn next(
        &self,
        upgrades_rx: &mut mpsc::Receiver<Upgrade>,
    ) -> (Successor, oneshot::Sender<Result<u32, String>>) {
        loop {
            let Some(Upgrade { reply }) = upgrades_rx.recv().await else { std::future::pending().await };
            self.enter(Phase::Serving, Phase::HandingOver);
            match self.hand_over().await {
                Ok(next) => return (next, reply),
                Err(why) => {
                    self.enter(Phase::HandingOver, Phase::Serving);
                    tracing::error!(why, "the upgrade failed; this supervisor keeps serving");
                    reply.send(Err(why)).ok();
                }
            }
        }
    }

    /// Changes the phase, unless a signal has changed it meanwhile.
    fn enter(&self, from: Phase, to: Phase) {
        self.phase.send_if_modified(|phase| {
            let is_expected = *phase == from;
            if is_expected {
                *phase = to;
            }
            is_expected
        });
    }

    async fn hand_over(&self) -> Result<Successor, String> {
        // A model that is loaded, reloaded or moved now would change behind the next supervisor's back.
        let _no_commands = self.admin.registry.pause_commands(self.within).await?;
        self.settled().await?;
        if let Some(model) = self.admin.models().rolling_out() {
            return Err(format!(
                "a rollout of model '{model}' is in progress; promote it or roll it back, and repeat the upgrade"
            ));
        }
        tracing::info!(program = %self.program.display(), "starting the next supervisor");
        let models = self.admin.models();
        let (state, path) = (PersistedState::of(&models, &self.admin.router), self.run_dir.state());
        let written = tokio::task::spawn_blocking(move || state.write(&path)).await;
        written
            .unwrap_or_else(|error| Err(io::Error::other(error)))
            .map_err(|error| format!("cannot write the models' state for the next supervisor: {error}"))?;
        let mut next = Successor::start(self).await?;
        let mut moved = Vec::new();
        let taken_over = async {
            self.move_all(&mut next, &models, &mut moved).await?;
            self.leave_history().await;
            next.go(self.final_state(&models)).await
        };
        if let Err(why) = taken_over.await {
            self.take_back(next, moved).await;
            return Err(why);
        }
        self.admin.registry.stay_moved();
        self.admin.gpus.iter().for_each(|gpu| gpu.pass());
        self.sockets.iter().for_each(PassableSocket::release);
        Ok(next)
    }

    /// Waits until no change of a share is in progress, which the next supervisor would not know.
    async fn settled(&self) -> Result<(), String> {
        let models = self.admin.models();
        for served in &models.served {
            // The report may be older than a change that has just begun, so the controller answers.
            let unchanging = async {
                let (done, is_done) = oneshot::channel();
                // An error here or below means that the controller has ended.
                served.orders.send(controller::Order::AwaitChange { done }).await.ok();
                is_done.await.ok();
            };
            timeout(self.within, unchanging).await.map_err(|_| {
                format!(
                    "the share of model '{}' was still changing after {:?}; try again",
                    served.model.name, self.within
                )
            })?;
        }
        Ok(())
    }

    async fn leave_history(&self) {
        let (history, file) = (Arc::clone(&self.admin.history), self.run_dir.history());
        let left = tokio::task::spawn_blocking(move || history.leave(&file)).await;
        if let Ok(Err(error)) = left {
            tracing::warn!(
                %error,
                "cannot write the history for the next supervisor; the charts of its page start empty"
            );
        }
    }

    fn final_state(&self, models: &ModelSet) -> FinalState {
        let names: BTreeSet<&str> = models.served.iter().map(|served| served.model.served_name()).collect();
        FinalState {
            drained: self.admin.router.host() == HostState::Drained,
            drained_models: names
                .into_iter()
                .filter(|name| self.admin.router.is_model_drained(name))
                .map(str::to_owned)
                .collect(),
            regions: self.memory.regions(),
        }
    }

    /// Moves each model that is ready in the next supervisor, one after the other.
    async fn move_all(
        &self,
        next: &mut Successor,
        models: &ModelSet,
        moved: &mut Vec<String>,
    ) -> Result<(), String> {
        loop {
            match next.hear(self.within, !moved.is_empty()).await? {
                Progress::Serves { model, described: there, why } => {
                    let here = models.served.iter().find(|served| served.model.name == model);
                    match (here, why) {
                        (Some(here), Some(why)) if here.pipeline.ready().is_ok() => {
                            return Err(format!(
                                "model '{model}' is ready here, but not in the next supervisor: {why}"
                            ));
                        }
                        // Requests are checked here, so both supervisors must accept the same requests.
                        (Some(here), None) if described(here) == there => {
                            moved.push(model.clone());
                            let socket = next.relay();
                            tokio::select! {
                                () = self.admin.registry.relay(&model, socket) => {}
                                why = next.lost() => return Err(why),
                            }
                        }
                        (Some(_), why) => {
                            tracing::info!(
                                model,
                                why,
                                "the model differs or is not ready in the next supervisor; this supervisor keeps the model's workers for its connected clients"
                            );
                        }
                        (None, _) => {}
                    }
                    next.say(&Instruction::Next).await?;
                }
                Progress::Started => return Ok(()),
                Progress::Failed(why) => {
                    next.ends().await;
                    return Err(format!("the next supervisor failed to start: {why}"));
                }
            }
        }
    }

    /// Takes the models back: one after the other while the next supervisor serves the others, and all
    /// together if it has exited.
    async fn take_back(&self, mut next: Successor, mut moved: Vec<String>) {
        while next.lives()
            && let Some(model) = moved.pop()
        {
            self.admin.registry.take_back(std::slice::from_ref(&model), false).await;
            next.say(&Instruction::Drop { model }).await.ok();
        }
        self.admin.registry.take_back(&moved, true).await;
        next.end().await;
    }
}
