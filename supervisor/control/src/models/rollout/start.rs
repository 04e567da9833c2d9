//! The start of a rollout, and commands to it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use shadowslice_config::{
    Config, ModelConfig, OnLate, RolloutConfig, ShareConfig, VersionFolder, rollout_with, version_of,
};
use shadowslice_policy::rollout::{RolloutRules, RolloutStage};
use shadowslice_shared::units::Percent;
use tokio::sync::{mpsc, oneshot};

use super::driver::{RolloutDriver, RolloutPair};
use super::{
    BegunRollout, CommandedRollout, MAX_QUEUED_COMMANDS, QueuedRolloutCommand, RolloutCommand, RolloutHandle,
    RolloutRequest,
};
use crate::controller::Served;
use crate::models::client_overrides::ClientOverrides;
use crate::models::desired::{DesiredModel, DesiredPresence, FirstShare, InstanceSpec};
use crate::models::needs::Needs;
use crate::models::registry::{Entry, ModelTable, Registry};
use crate::models::versions::ActiveRollout;
use crate::process::LoadedFiles;

const MIB: u64 = 1 << 20;

impl Registry {
    /// Starts a new version of a model beside the released one. Returns before the new version serves.
    ///
    /// # Errors
    ///
    /// Returns the reason why nothing was started.
    pub async fn begin_rollout(&self, request: &RolloutRequest) -> Result<BegunRollout, String> {
        let _permit = self.begin_command()?;
        let _turn = self.0.reading.lock().await;
        let config = {
            let table = self.table();
            let entry = released_entry(&table, &request.model)?;
            entry.model().rollout.clone()
        };
        let config = rollout_with(config.as_ref(), request.changes.as_deref().unwrap_or("{}"))?;
        self.start_rollout(&request.model, &request.path, config).await
    }

    /// Starts a rollout. The caller has the turn to read files.
    pub(in crate::models) async fn start_rollout(
        &self,
        model: &str,
        path: &Path,
        config: RolloutConfig,
    ) -> Result<BegunRollout, String> {
        let (former, number, all) = {
            let table = self.table();
            let former = former(&table, model)?;
            if former
                .model
                .engine
                .path()
                .is_some_and(|served| served == path || served.parent() == Some(path))
            {
                return Err(format!("{} is the released version of model '{model}'", path.display()));
            }
            let number = match &former.model.version.folder {
                Some(folder) => number_in(folder, path)?,
                None => table.newest(model) + 1,
            };
            (former, number, table.desired_config())
        };
        let candidate = self.read_version((model, number), path, all).await?;
        self.launch(former, candidate, config).await
    }

    /// Starts a rollout to a version that the configuration file describes.
    pub(in crate::models) async fn start_version(
        &self,
        model: &str,
        mut candidate: ModelConfig,
        config: RolloutConfig,
    ) -> Result<BegunRollout, String> {
        let former = {
            let table = self.table();
            if candidate.version.folder.is_none() {
                candidate.version.number = table.newest(model) + 1;
                candidate.name = candidate.version.instance_name();
            }
            former(&table, model)?
        };
        self.launch(former, candidate, config).await
    }

    /// Reads the configuration of a version.
    async fn read_version(
        &self,
        (model, number): (&str, u32),
        path: &Path,
        config: Config,
    ) -> Result<ModelConfig, String> {
        let (name, given) = (model.to_owned(), path.to_owned());
        let read = move || version_of(&config, &name, number, &version_path(given));
        let version = self.0.files.lock().await.read(read).await?;
        version.ok_or_else(|| "the configuration does not contain the model".to_owned())
    }

    /// Checks that the GPU has memory for both versions.
    ///
    /// # Errors
    ///
    /// Returns how much memory the new version needs and finds.
    async fn check_memory(&self, former: &Served, candidate: &ModelConfig) -> Result<(), String> {
        let context = &self.0.factory.context;
        let readings = context.readings.look();
        let free = || Some(readings.get(candidate.gpu)?.as_ref()?.usage.as_ref()?.memory.free);
        let Some(free) = context.residency.available(candidate.gpu).or_else(free) else { return Ok(()) };
        let beside = Needs::of(former, &readings).shadow.unwrap_or(0);
        let weights = match candidate.copy_memory() {
            Some(memory) => memory.weights,
            None => {
                let model = candidate.clone();
                self.0.files.lock().await.read(move || LoadedFiles::open(&model).bytes()).await?
            }
        };
        let needed = weights.saturating_add(beside);
        if needed <= free {
            return Ok(());
        }
        Err(format!(
            "version {} needs about {} MiB on GPU {}, where {} MiB are free; make room there, or use --replace",
            candidate.version.number,
            needed.div_ceil(MIB),
            candidate.gpu,
            free / MIB
        ))
    }

    /// Checks the new version, and starts it.
    async fn launch(
        &self,
        former: Served,
        candidate: ModelConfig,
        mut config: RolloutConfig,
    ) -> Result<BegunRollout, String> {
        if let Some(why) = candidate.broken {
            return Err(why);
        }
        let (name, number) = (former.model.served_name(), candidate.version.number);
        if number == former.model.version.number {
            return Err(format!(
                "version {number} of model '{name}' is already released; give the new version a higher number"
            ));
        }
        // The new version gets the settings that clients have changed.
        let desired = self.table().instance(&former.model.name).map(Entry::model);
        let ModelConfig { gpu, share, slo, .. } = *desired.unwrap_or_else(|| Arc::clone(&former.model));
        let candidate = ModelConfig { gpu, share, slo, ..candidate };
        let is_loaded = self.table().instance(&candidate.name).is_some();
        let shortage = match is_loaded {
            true => None,
            false => self.check_memory(&former, &candidate).await.err(),
        };
        if let Some(why) = &shortage {
            if !config.replace {
                return Err(why.clone());
            }
            may_sleep(&former)?;
            config.rules = RolloutRules { mirror: 0.0, canary: Vec::new(), ..config.rules };
        }
        Ok(self.run_rollout(&former, candidate, config, shortage.is_some()))
    }

    /// Adds the instance of the new version, and runs the rollout.
    fn run_rollout(
        &self,
        former: &Served,
        candidate: ModelConfig,
        config: RolloutConfig,
        sleeps_first: bool,
    ) -> BegunRollout {
        let (name, number) = (former.model.served_name().to_owned(), candidate.version.number);
        let config = Arc::new(config);
        let (commands_tx, commands_rx) = mpsc::channel(MAX_QUEUED_COMMANDS);
        let handle = RolloutHandle {
            candidate: number,
            former: former.model.version.number,
            stage: RolloutStage::Starting,
            stage_since: SystemTime::now(),
            kept_until: None,
            config: Arc::clone(&config),
            ledger: Arc::default(),
            commands_tx,
        };
        let begun = BegunRollout { candidate: number, former: handle.former };
        tracing::info!(
            model = name,
            version = number,
            path = %candidate.engine.path().unwrap_or(Path::new("")).display(),
            "a new version of the model starts beside the released one"
        );
        let pair = RolloutPair { candidate: Arc::new(candidate), former: Arc::clone(&former.model) };
        let mut table = self.table();
        // Answers of streams are not compared.
        let mut driver = RolloutDriver::new(self.clone(), name.clone(), pair, handle.clone(), commands_rx);
        (driver.sleeps_first, driver.copies) = (sleeps_first, !former.pipeline.streams());
        let versions = table.versions.entry(name).or_default();
        versions.released = Some(begun.former);
        versions.rollout = Some(ActiveRollout { handle, mirror: None, canary: None });
        let is_new = table.instance(&driver.pair.candidate.name).is_none();
        if is_new {
            driver.awaited = 1;
            let first = driver.first_share(former);
            let presence = DesiredPresence::Served { first, relay_is_lost: false };
            let spec = InstanceSpec { model: driver.first_config(), load: 0 };
            let desired = DesiredModel { spec, presence, share: None };
            let reconciler = self.add(&mut table, desired, ClientOverrides::default());
            self.spawn(reconciler.run());
        }
        driver.remember_former(&mut table);
        self.publish(&table);
        drop(table);
        self.spawn(driver.run());
        begun
    }

    /// Ends the stage of a rollout, or rolls it back.
    ///
    /// # Errors
    ///
    /// Returns the reason why the command had no effect.
    pub async fn command_rollout(
        &self,
        model: &str,
        command: RolloutCommand,
    ) -> Result<CommandedRollout, String> {
        let commands_tx = {
            let table = self.table();
            released_entry(&table, model)?;
            let none = || {
                format!(
                    "model '{model}' has no rollout in progress, and no former version is kept; start a rollout \
                     with `shadowslice rollout {model} PATH`"
                )
            };
            table.rollout(model).ok_or_else(none)?.commands_tx.clone()
        };
        let (reply_tx, reply_rx) = oneshot::channel();
        let busy = |_| "too many commands wait for the rollout; try again later".to_owned();
        commands_tx.try_send(QueuedRolloutCommand { command, reply_tx }).map_err(busy)?;
        reply_rx.await.map_err(|_| "the rollout has ended; see `shadowslice status`".to_owned())?
    }
}

fn released_entry<'t>(table: &'t ModelTable, model: &str) -> Result<&'t Entry, String> {
    table.released(model).ok_or_else(|| format!("model '{model}' not found"))
}

/// Returns the released version of a model, if a rollout can start.
fn former(table: &ModelTable, model: &str) -> Result<Served, String> {
    let entry = released_entry(table, model)?;
    if let Some(&RolloutHandle { candidate, stage, .. }) = table.rollout(model) {
        return Err(match stage {
            RolloutStage::Released => format!(
                "the version before version {candidate} of model '{model}' is still kept (rollout.keep); run \
                 `shadowslice promote {model}` to unload it"
            ),
            _ => format!(
                "version {candidate} of model '{model}' is being rolled out; promote it or roll it back first"
            ),
        });
    }
    let Some(former) = entry.row.served().filter(|_| !entry.is_failing()).cloned() else {
        return Err(format!("model '{model}' does not serve; load its version with `shadowslice reload`"));
    };
    match former.model.engine.path() {
        Some(_) => Ok(former),
        None => Err(format!("model '{model}' has the emulated engine, which has no versions")),
    }
}

/// Checks that the released version can sleep, to make room for the new one.
fn may_sleep(former: &Served) -> Result<(), String> {
    let is_running = former.pipeline.sleep_report().is_some();
    let why = "both versions do not fit on the GPU, and no worker of the released one runs; load it first";
    if is_running { Ok(()) } else { Err(why.to_owned()) }
}

/// Returns the path that the engine gets for a version. A folder with an ONNX model stands for the model.
fn version_path(given: PathBuf) -> PathBuf {
    let file = given.join("model.onnx");
    if file.is_file() && !given.join("model.py").is_file() { file } else { given }
}

/// Returns the number of the version at a path in the model's folder of versions.
fn number_in(folder: &VersionFolder, path: &Path) -> Result<u32, String> {
    let number = || {
        let inside = path.strip_prefix(&folder.path).ok()?;
        inside.components().next()?.as_os_str().to_str()?.parse().ok()
    };
    let folder = folder.path.display();
    number().ok_or_else(|| format!("give a version in {folder}, for example {folder}/2"))
}

impl RolloutDriver {
    /// Returns the share with which the new version starts.
    pub(super) fn first_share(&self, former: &Served) -> FirstShare {
        let share = match self.mirrors() {
            true => self.first_config().share.initial,
            false => former.report.borrow().share,
        };
        FirstShare { share, held: false }
    }

    /// Returns the configuration with which the new version starts.
    pub(super) fn first_config(&self) -> Arc<ModelConfig> {
        if self.mirrors() { Arc::new(self.at_small_share()) } else { Arc::clone(&self.pair.candidate) }
    }

    fn mirrors(&self) -> bool {
        self.copies && self.config().rules.mirror > 0.0
    }

    /// Returns the configuration of the new version while it only gets copies. The comparison needs all
    /// answers, even late ones.
    pub(super) fn at_small_share(&self) -> ModelConfig {
        let mut model = (*self.pair.candidate).clone();
        let share: Percent = self.config().share.clamp(model.share.min, model.share.max);
        model.share = ShareConfig { initial: share, given: true, min: model.share.min, max: share };
        model.queue.on_late = OnLate::Serve;
        model
    }
}
