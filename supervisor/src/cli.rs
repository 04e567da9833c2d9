//! The command line.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::{check_run, cost, init, manual, place, rollout, serve};
use shadowslice_config as config;
use shadowslice_control::host;
use shadowslice_ingress::expiry_warnings;
use shadowslice_operations::admin::{self, ControlRequest};
use shadowslice_operations::doctor;
use shadowslice_operations::profile;
use shadowslice_operations::top;
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};
use shadowslice_shared::units::Percent;

/// Serves models on shared GPUs: one worker process for each model, resized while it serves.
///
/// The supervisor starts a worker for each model of a configuration and gives it a share of the
/// GPU's SMs. It answers the Open Inference Protocol over HTTP and gRPC, on Unix sockets and TCP. A
/// share changes between two batches. If the model and the GPU allow it, the worker moves to other
/// SMs. Otherwise a shadow worker starts at the new share, warms up and takes over the traffic.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "Exit codes: 0 success, 1 refused, 64 wrong usage, 69 unavailable (a GPU, ONNX Runtime or a running\nsupervisor), 70 internal error, 78 invalid configuration, 143 stopped immediately by a second signal.\n\nLogs go to stderr. RUST_LOG=debug shows more; SHADOWSLICE_LOG=json writes them as JSON."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the models of a configuration, in the foreground, until SIGTERM or SIGINT.
    ///
    /// After the signal, the supervisor answers the requests that it has accepted, and exits. If
    /// `timeouts.lame_duck` is set, the supervisor first reports that it is not ready and keeps
    /// serving for that time after SIGTERM. A second signal ends this time early; another signal
    /// stops the supervisor immediately.
    Serve {
        /// The configuration file.
        config: PathBuf,
    },
    /// Write a first Python model and a configuration that serves it.
    ///
    /// `init` overwrites no file. The model needs NumPy for the first python3 on the PATH.
    Init {
        /// The folder for `model.py` and `shadowslice.yaml`; `init` creates it.
        folder: PathBuf,
    },
    /// Report every error in a configuration, as file:line:column: message.
    ///
    /// With --run, `check` also starts each model, one after the other, with the worker and the
    /// sandbox that serve it, on its GPU. The model runs a batch of each size, and its outputs are
    /// verified; then its worker stops. Exit code 1 means that a model cannot be served.
    Check {
        /// The configuration file.
        #[arg(required_unless_present = "schema")]
        config: Option<PathBuf>,
        /// Print the whole configuration with its defaults, instead of a summary.
        #[arg(long)]
        print: bool,
        /// Do not import Python models, which can take half a minute each.
        #[arg(long)]
        no_import: bool,
        /// Start each model once, and show its tensors, batch sizes and times, or why it cannot be
        /// served.
        #[arg(long, conflicts_with_all = ["print", "no_import"])]
        run: bool,
        /// Print the JSON Schema of configurations and profiles, for editors, and check no file.
        #[arg(long, exclusive = true)]
        schema: bool,
    },
    /// Show each model's state, share, requests and latency.
    ///
    /// DONE, FAILED and REFUSED count requests since the start. P50 MS, P99 MS and IN SLO cover the
    /// last minute or two; `idle` means that no request came. An h after the SHARE means that the
    /// share is held. `top` and `--json` show more.
    Status {
        /// Print JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Show models and GPUs live in the terminal.
    ///
    /// For each model, `top` shows its state, share, SMs, load, latencies, queue, refusals and last
    /// change, with rates over the last 10 s. For each GPU, it shows the models on its SMs, the
    /// memory and the power. The letter in column M marks the model on the GPU's SMs. `inside` in
    /// column BY means that the share changes inside the worker. Press j/k or the arrow keys to
    /// select a model, and q to quit.
    Top {
        #[command(flatten)]
        options: top::TopOptions,
        #[command(flatten)]
        at: RunDir,
    },
    /// Change a model's share, and wait until the change is complete.
    ///
    /// The worker moves to other SMs. If it cannot, a shadow worker starts at the new share, warms
    /// up and verifies its outputs while the incumbent serves, then takes over between two batches.
    /// The policy does not change that share until `shadowslice release`.
    Resize {
        /// The model's name.
        model: String,
        /// The share of the GPU's SMs, for example 30%.
        share: Percent,
        /// Print JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Reload the configuration file: add, remove and change models while the supervisor serves.
    ///
    /// If the file has errors (exit code 78), or if one of its changes requires a restart, nothing
    /// changes. SIGHUP also reloads the file.
    Reload {
        /// Print JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Move a model (with `gpu: auto`) to another GPU, and wait until it is ready.
    ///
    /// New workers start on that GPU and verify their outputs while the current workers serve, then
    /// take over. If the new workers do not become ready, the model stays on its GPU. Later, the
    /// supervisor moves the model automatically only if a model violates its SLO.
    Move {
        /// The model's name.
        model: String,
        /// The GPU's index in the configuration, counted from 0.
        gpu: usize,
        #[command(flatten)]
        at: RunDir,
    },
    /// Roll out a new version of a model beside the released one, step by step.
    ///
    /// The new version starts beside the released one and verifies its outputs. It first gets copies
    /// of requests at a small share, and its answers and times are compared (--mirror). Then it
    /// answers a growing part of the requests (--canary), and at last all of them. It is rolled back
    /// when it fails, violates the SLO, or exceeds a bound. Options that you do not give come from
    /// the model's `rollout` section.
    Rollout {
        #[command(flatten)]
        options: Box<rollout::RolloutOptions>,
        #[command(flatten)]
        at: RunDir,
    },
    /// End the current step of a model's rollout, so that the next one begins.
    ///
    /// When the new version is released, `promote` unloads the former version.
    Promote {
        /// The model's name.
        model: String,
        #[command(flatten)]
        at: RunDir,
    },
    /// Send all requests to the former version of a model again, and end the rollout.
    ///
    /// The former version is loaded during a rollout, and for `rollout.keep` after it.
    Rollback {
        /// The model's name.
        model: String,
        #[command(flatten)]
        at: RunDir,
    },
    /// Replace the running supervisor with the installed version, while it serves clients.
    ///
    /// The new supervisor reads the configuration file and starts its own workers beside the
    /// running supervisor. It takes over one model after the other, then the connections. The old
    /// supervisor finishes the requests that it has accepted, and exits. If a model does not become ready in
    /// the new supervisor, all models return to the old one. Settings that require a restart, such
    /// as listeners and limits, may differ.
    Upgrade {
        #[command(flatten)]
        at: RunDir,
    },
    /// Keep the policy from changing a model's share, until you release it.
    ///
    /// A hand-over in progress completes. `resize` also changes a held share, and holds the share
    /// that it sets.
    Hold {
        /// The model's name.
        model: String,
        #[command(flatten)]
        at: RunDir,
    },
    /// Let the policy change a model's share again.
    Release {
        /// The model's name.
        model: String,
        #[command(flatten)]
        at: RunDir,
    },
    /// Make a model sleep: release its weights on the GPU until a request arrives.
    ///
    /// The model stays ready. Its next request wakes it and waits some milliseconds for this. With
    /// `sleep` in the configuration, models sleep automatically.
    Sleep {
        /// The model's name.
        model: String,
        #[command(flatten)]
        at: RunDir,
    },
    /// Wake a model that sleeps, before its next request arrives.
    Wake {
        /// The model's name.
        model: String,
        #[command(flatten)]
        at: RunDir,
    },
    /// Report the host, or one model, as not ready, so that load balancers send requests elsewhere.
    ///
    /// Requests that still arrive are served. The drain lasts until `shadowslice undrain`, or until
    /// the supervisor exits.
    Drain {
        /// The model's name [default: the whole host].
        model: Option<String>,
        #[command(flatten)]
        at: RunDir,
    },
    /// Report the host, or one model, as ready again.
    Undrain {
        /// The model's name [default: the host; models that you drained by name stay drained].
        model: Option<String>,
        #[command(flatten)]
        at: RunDir,
    },
    /// Show which shares the policy would change now, and why.
    ///
    /// For each model, `plan` shows the current share, the share that the policy wants, the
    /// reason, and what prevents the change. With `act: false` in the configuration, the policy
    /// changes no share and only reports.
    Plan {
        /// Print JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Check what this host offers, and show how to fix what is missing.
    ///
    /// A fault (exit code 69) keeps models from being served on real GPUs. If you give a
    /// configuration, only what it needs counts as a fault. `doctor` changes nothing on the host.
    Doctor(doctor::DoctorOptions),
    /// Compute which GPUs should run which models, as JSON; nothing changes.
    ///
    /// SPEC is one JSON object. `gpus` lists the GPUs, each with `host`, `gpu`, `sms` and
    /// `memory_mib`. `models` lists the models, each with `name`, `copies` (default 1), `priority`
    /// (default 1, the highest), the GPUs that it is `on` (host and gpu), and what a copy needs.
    /// Give this need as `sms`, `memory_mib`, `shadow_mib` and `bandwidth` (0 to 1), or as a
    /// `profile` (a path), `slo_ms`, the `rate` of all copies in requests per second, `max_batch`
    /// (default 32) and, if the copies sleep now, `asleep: true`.
    Place {
        /// A JSON file, or - for standard input.
        spec: PathBuf,
    },
    /// Measure a model's time and memory on a device, over batch sizes and shares, and write its
    /// profile.
    ///
    /// `profile` starts workers as `serve` does, for one share after the other. Nothing else should
    /// use the device during the measurement.
    Profile(Box<profile::ProfileOptions>),
    /// Measure what inferences of each model cost, alone and together.
    ///
    /// `cost` starts the models as `serve` does, without addresses for clients. It searches the highest
    /// rate at which each model alone meets its SLO, and then the highest common factor of these rates
    /// at which all of them meet their SLOs together. It prints the cost and the GPU's energy of a
    /// million inferences, and what sharing saves. Nothing else should use the GPU. Five models take
    /// about five minutes.
    Cost(Box<cost::CostOptions>),
    /// Print a script for a shell that completes this program's commands, options and values.
    ///
    /// Packages install this script. To load the script manually, run `source <(shadowslice completions bash)`.
    Completions { shell: Shell },
    /// Write the manual pages, for packages.
    #[command(hide = true)]
    Man {
        /// An existing folder.
        folder: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
struct RunDir {
    /// The running supervisor's run_dir [default: the one that `serve` uses if its configuration
    /// gives none].
    #[arg(long, env = "SHADOWSLICE_RUN_DIR")]
    run_dir: Option<PathBuf>,
}

impl RunDir {
    fn path(self) -> Result<PathBuf, u8> {
        let unknown = "cannot tell the supervisor's run directory; give --run-dir or set SHADOWSLICE_RUN_DIR";
        self.run_dir.or_else(config::default_run_dir).ok_or_else(|| fail(unknown, exit::USAGE))
    }
}

pub(crate) fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are errors to clap, and go to stdout.
            error.print().ok();
            return ExitCode::from(if error.use_stderr() { exit::USAGE } else { 0 });
        }
    };
    let code = match cli.command {
        Command::Serve { config } => serve::run(&config),
        Command::Init { folder } => match init::write(&folder) {
            Ok(text) => print(&text),
            Err(error) => fail(&errors::chain(&error), exit::UNAVAILABLE),
        },
        Command::Check { config: None, .. } => print(config::schema()),
        Command::Check { config: Some(config), print, no_import, run, schema: _ } => {
            let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
            let refused = |path: &Path| host::RunDir::refuses(path).map(|why| errors::chain(&why));
            let fault_of =
                |model: &config::ModelConfig| if no_import || run { None } else { host::fault_of(model) };
            let checks = config::check::CheckHooks { run_dir: &refused, model: &fault_of, advice: &advice };
            let checked = config::check::run(&config, print, checks, &mut out, &mut err);
            drop((out, err));
            match checked {
                Ok(0) if run => check_run::run(&config),
                Ok(code) => code,
                Err(error) => exit::code_of_output(Err(error)),
            }
        }
        Command::Status { json, at } => send(&ControlRequest::Status, json, at),
        Command::Top { options, at } => at.path().map_or_else(|code| code, |at| top::run(&options, &at)),
        Command::Resize { model, share, json, at } => {
            send(&ControlRequest::Resize { model, share_percent: share.get() }, json, at)
        }
        Command::Reload { json, at } => send(&ControlRequest::Reload, json, at),
        Command::Move { model, gpu, at } => send(&ControlRequest::Move { model, gpu }, false, at),
        Command::Rollout { options, at } => {
            at.path().map_or_else(|code| code, |at| rollout::run(&options, &at))
        }
        Command::Promote { model, at } => send(&ControlRequest::Promote { model }, false, at),
        Command::Rollback { model, at } => send(&ControlRequest::Rollback { model }, false, at),
        Command::Upgrade { at } => send(&ControlRequest::Upgrade, false, at),
        Command::Hold { model, at } => send(&ControlRequest::Hold { model, held: true }, false, at),
        Command::Release { model, at } => send(&ControlRequest::Hold { model, held: false }, false, at),
        Command::Sleep { model, at } => send(&ControlRequest::Sleep { model, asleep: true }, false, at),
        Command::Wake { model, at } => send(&ControlRequest::Sleep { model, asleep: false }, false, at),
        Command::Drain { model, at } => send(&ControlRequest::Drain { model, drained: true }, false, at),
        Command::Undrain { model, at } => send(&ControlRequest::Drain { model, drained: false }, false, at),
        Command::Plan { json, at } => send(&ControlRequest::Plan, json, at),
        Command::Place { spec } => match place::run(&spec) {
            Ok(placement) => print(&placement),
            Err(error) => fail(&errors::chain(&error), exit::CONFIG),
        },
        Command::Doctor(options) => doctor::run(&options),
        Command::Profile(options) => profile::run(&options),
        Command::Cost(options) => cost::run(&options),
        Command::Completions { shell } => manual::completions(Cli::command(), shell),
        Command::Man { folder } => manual::pages(Cli::command(), &folder),
    };
    ExitCode::from(code)
}

/// Returns the warnings of a start with this configuration.
fn advice(config: &config::Config) -> Vec<String> {
    let config::ListenConfig { http, grpc, metrics } = &config.listen;
    let listeners = [http, grpc, metrics].into_iter().flatten();
    let mut warnings: Vec<String> = Vec::new();
    for listener in listeners {
        let config::Listener::Tcp { tls: Some(tls), .. } = listener else { continue };
        for warning in expiry_warnings(tls) {
            // Listeners may share files.
            if !warnings.contains(&warning) {
                warnings.push(warning);
            }
        }
    }
    warnings.extend(host::connections_warning(config));
    warnings
}

fn send(request: &ControlRequest, json: bool, at: RunDir) -> u8 {
    let run_dir = match at.path() {
        Ok(run_dir) => run_dir,
        Err(code) => return code,
    };
    match admin::send(&run_dir, request) {
        Ok(reply) => admin::show(request, reply, json),
        Err(error) => fail(&errors::chain(&error), exit::UNAVAILABLE),
    }
}

fn print(text: &str) -> u8 {
    exit::print(&format!("{text}\n"))
}
