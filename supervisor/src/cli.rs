//! The command line.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::{check_run, init, manual, place, serve};
use shadowslice_config as config;
use shadowslice_control::controller::HandoverReport;
use shadowslice_control::host;
use shadowslice_control::models::{ModelChange, ReloadReport};
use shadowslice_ingress::expiry_warnings;
use shadowslice_operations::admin::{self, Ask, Reply};
use shadowslice_operations::doctor;
use shadowslice_operations::profile;
use shadowslice_operations::{figures, status, top};
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};
use shadowslice_shared::units::Percent;

/// Shares a GPU among models: a worker process each, resized while it serves.
///
/// A supervisor serves all models of a configuration. It starts a worker for each, gives it a share of the GPU's
/// SMs, and answers the Open Inference Protocol over HTTP and gRPC, on Unix sockets and TCP. A share
/// changes between two batches: inside the worker where the model and the GPU allow that, else by a
/// shadow worker that starts at the new share, warms up and takes the traffic over.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "Exit codes: 0 fine, 1 refused, 64 usage, 69 something needed is unavailable (GPU, ONNX Runtime,\na running supervisor), 70 a fault of this program, 78 bad configuration, 143 ended by a second signal.\n\nLogs go to stderr; RUST_LOG=debug shows more, SHADOWSLICE_LOG=json makes them JSON."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run in the foreground until SIGTERM or SIGINT, then answer what was accepted and end.
    ///
    /// With `timeouts.lame_duck` it serves on for so long after SIGTERM, and says that it is not ready; a second signal
    /// ends that. Then a further signal ends it at once.
    Serve {
        /// The configuration.
        config: PathBuf,
    },
    /// Write a model in Python and a configuration that serves it, to begin with.
    ///
    /// Nothing is overwritten. The model needs NumPy for the first python3 on the PATH.
    Init {
        /// The folder for `model.py` and `shadowslice.yaml`; it is made.
        folder: PathBuf,
    },
    /// Name every fault of a configuration, as file:line:column: message.
    ///
    /// With --run, start each model, too: one after the other, with the worker and the sandbox that serve it, on its GPU.
    /// A model runs a batch of each size and proves its answers; then its worker ends. Exit code 1 says that a model
    /// cannot be served.
    Check {
        /// The configuration.
        config: PathBuf,
        /// Show the whole configuration, with its defaults, instead.
        #[arg(long)]
        print: bool,
        /// Import no Python models, which may take half a minute each.
        #[arg(long)]
        no_import: bool,
        /// Start each model once, and show its tensors, batch sizes and times, or why it cannot be served.
        #[arg(long, conflicts_with_all = ["print", "no_import"])]
        run: bool,
    },
    /// Show what serves what, at which share, and how well.
    ///
    /// DONE, FAILED and REFUSED are requests since the start. P50 MS, P99 MS and IN SLO are over the
    /// last minute or two; `idle` if no request came. An h after SHARE: the share is held. `top` and
    /// `--json` show more.
    Status {
        /// As JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Show models and GPUs live in the terminal.
    ///
    /// Per model its state, share, SMs, load, latencies, queue, refusals and last change, with rates over the last 10 s; per GPU the
    /// models on its SMs, memory and power. The letter in column M stands for the model there, and
    /// `inside` in column BY for a share that changes inside the worker. j/k or arrows select a
    /// model, q ends.
    Top {
        #[command(flatten)]
        options: top::Options,
        #[command(flatten)]
        at: RunDir,
    },
    /// Give a model another share, and wait until it is in force.
    ///
    /// The worker moves to other SMs, or a shadow worker starts at the new share, warms up and proves its answers while the
    /// incumbent serves, and takes over between two batches. A policy does not change that share until `shadowslice release`.
    Resize {
        /// The model's name.
        model: String,
        /// The share of the GPU's SMs, e.g. 30%.
        share: Percent,
        /// As JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Go by the configuration's file as it is now: models are added, removed and changed while all serve.
    ///
    /// A file with faults (exit code 78) changes nothing, nor does one that asks for what takes a restart. SIGHUP does
    /// the same.
    Reload {
        /// As JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Have a model with `gpu: auto` on another GPU, and wait until it serves there.
    ///
    /// Its workers start there and prove their answers while those here serve, then take over. If they do not come to
    /// serve, the model stays. Later it moves by itself only where a model misses its SLO.
    Move {
        /// The model's name.
        model: String,
        /// The GPU's place in the configuration, counted from 0.
        gpu: usize,
        #[command(flatten)]
        at: RunDir,
    },
    /// Have the installed version of this program take over from the running one, while clients are served.
    ///
    /// It starts beside the running supervisor, with the configuration as it is now and workers of its own. It takes over
    /// one model after the other, then the connections; the old one answers what it has, and ends. If a model does not
    /// serve there, all come back. What takes a restart, such as other listeners or limits, may differ.
    Upgrade {
        #[command(flatten)]
        at: RunDir,
    },
    /// Keep the policy from changing a model's share, until it is released.
    ///
    /// A hand-over under way is finished. `resize` changes held shares too, and holds what it sets.
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
    /// Have the host, or one model, say that it is not ready, so that load balancers send elsewhere.
    ///
    /// It goes on to serve, and answers what comes, until `shadowslice undrain` or its end.
    Drain {
        /// The model's name; without it the whole host is drained.
        model: Option<String>,
        #[command(flatten)]
        at: RunDir,
    },
    /// Have the host, or one model, say again that it is ready.
    Undrain {
        /// The model's name; without it the host, of which models may stay drained.
        model: Option<String>,
        #[command(flatten)]
        at: RunDir,
    },
    /// Show what the policy would do now, and why.
    ///
    /// Each model's share in force, the one that it should have, what that rests on, and what keeps it from being
    /// ordered. With `act: false` in the configuration that is all that the policy does.
    Plan {
        /// As JSON, for scripts.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        at: RunDir,
    },
    /// Check what this host offers, and say what to do about what is missing.
    ///
    /// Nothing is changed or started. A fault, and exit code 69, is what keeps models from being served on real
    /// GPUs; with a configuration, only what that one needs.
    Doctor(doctor::Options),
    /// Say which GPUs should have which models, as JSON; nothing is changed.
    ///
    /// The wish is one object: `gpus`, each with `host`, `gpu`, `sms` and `memory_mib`; and `models`, each with `name`,
    /// `copies` (1), `priority` (1, the highest), the GPUs that it is `on` (host and gpu), and what a copy needs: `sms`, `memory_mib`,
    /// `shadow_mib` and `bandwidth` (0 to 1), or a `profile` (a path), `slo_ms`, the `rate` of all copies in requests per
    /// second, and `max_batch` (32).
    Place {
        /// A file, or - for the standard input.
        wish: PathBuf,
    },
    /// Measure what a model costs on a device, over batch sizes and shares, and write its profile.
    ///
    /// Workers are started as for serving, one share after the other; nothing else should use the device.
    Profile(Box<profile::Options>),
    /// Print what a shell needs to complete this program's commands, options and values.
    ///
    /// Packages install it. By hand: `source <(shadowslice completions bash)`.
    Completions { shell: Shell },
    /// Write the manual's pages, for packages.
    #[command(hide = true)]
    Man {
        /// An existing folder.
        folder: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
struct RunDir {
    /// The running supervisor's run_dir [default: as `serve` chooses it where its file says none].
    #[arg(long, env = "SHADOWSLICE_RUN_DIR")]
    run_dir: Option<PathBuf>,
}

impl RunDir {
    fn known(self) -> Result<PathBuf, u8> {
        let unknown = "no run directory is known: give --run-dir or SHADOWSLICE_RUN_DIR";
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
        Command::Check { config, print, no_import, run } => {
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
        Command::Status { json, at } => ask(&Ask::Status, json, at),
        Command::Top { options, at } => at.known().map_or_else(|code| code, |at| top::run(&options, &at)),
        Command::Resize { model, share, json, at } => {
            ask(&Ask::Resize { model, share_percent: share.get() }, json, at)
        }
        Command::Reload { json, at } => ask(&Ask::Reload, json, at),
        Command::Move { model, gpu, at } => ask(&Ask::Move { model, gpu }, false, at),
        Command::Upgrade { at } => ask(&Ask::Upgrade, false, at),
        Command::Hold { model, at } => ask(&Ask::Hold { model, held: true }, false, at),
        Command::Release { model, at } => ask(&Ask::Hold { model, held: false }, false, at),
        Command::Drain { model, at } => ask(&Ask::Drain { model, drained: true }, false, at),
        Command::Undrain { model, at } => ask(&Ask::Drain { model, drained: false }, false, at),
        Command::Plan { json, at } => ask(&Ask::Plan, json, at),
        Command::Place { wish } => match place::run(&wish) {
            Ok(placement) => print(&placement),
            Err(error) => fail(&errors::chain(&error), exit::CONFIG),
        },
        Command::Doctor(options) => doctor::run(&options),
        Command::Profile(options) => profile::run(&options),
        Command::Completions { shell } => manual::completions(Cli::command(), shell),
        Command::Man { folder } => manual::pages(Cli::command(), &folder),
    };
    ExitCode::from(code)
}

/// What a start would warn of.
fn advice(config: &config::Config) -> Vec<String> {
    let config::ListenConfig { http, grpc, metrics } = &config.listen;
    let listeners = [http, grpc, metrics].into_iter().flatten();
    let mut warnings: Vec<String> = Vec::new();
    for listener in listeners {
        let config::Listener::Tcp { tls: Some(tls), .. } = listener else { continue };
        for warning in expiry_warnings(tls) {
            // Listeners share files.
            if !warnings.contains(&warning) {
                warnings.push(warning);
            }
        }
    }
    warnings.extend(host::connections_warning(config));
    warnings
}

fn ask(ask: &Ask, json: bool, at: RunDir) -> u8 {
    let run_dir = match at.known() {
        Ok(run_dir) => run_dir,
        Err(code) => return code,
    };
    match admin::ask(&run_dir, ask) {
        Ok(reply) => show(ask, reply, json),
        Err(error) => fail(&errors::chain(&error), exit::UNAVAILABLE),
    }
}

fn show(asked: &Ask, reply: Reply, json: bool) -> u8 {
    match (asked, reply) {
        (_, Reply::Status(status)) if json => print(&as_json(&status)),
        (_, Reply::Status(status)) => print(status::text(&status).trim_end()),
        (_, Reply::Plan(report)) if json => print(&as_json(&report)),
        (_, Reply::Plan(report)) => print(status::plan(&report).trim_end()),
        (_, Reply::Handover { report, held }) => {
            let printed = print(&if json { as_json(&report) } else { in_words(&report) + kept(held) });
            report.why.map_or(printed, |why| unchanged(&why))
        }
        (_, Reply::Unchanged { why, held }) if json => {
            print(&as_json(&serde_json::json!({"outcome": "unchanged", "why": why, "held": held})))
        }
        (_, Reply::Unchanged { why, held }) => print(&(why + kept(held))),
        (_, Reply::Reloaded(report)) => {
            let printed = print(&if json { as_json(&report) } else { reloaded(&report) });
            match report.models.iter().filter(|model| model.why.is_some()).count() {
                0 => printed,
                failed => fail(&format!("{failed} of the changes are not in force"), exit::REFUSED),
            }
        }
        (Ask::Move { model, .. }, Reply::Placed { gpu, news }) => {
            print(&format!("{model} {} on GPU {gpu}", if news { "serves now" } else { "was already" }))
        }
        (_, Reply::Upgraded { pid }) => print(&format!("process {pid} serves now")),
        (_, Reply::Faulty(faults)) => {
            exit::print_error(&faults);
            fail("the configuration has faults; nothing was changed", exit::CONFIG)
        }
        (Ask::Hold { model, .. }, Reply::Held { held, news }) => {
            let how = if news { "is" } else { "was already" };
            let what = if held { "held: no policy changes its share" } else { "free: the policy decides" };
            print(&format!("{model} {how} {what}"))
        }
        (Ask::Drain { model, .. }, Reply::Drained { drained, news }) => {
            let what = model.as_deref().unwrap_or("the host");
            let how = if news { "is" } else { "was already" };
            let so = if drained { "drained: it serves, and says that it is not ready" } else { "undrained" };
            print(&format!("{what} {how} {so}"))
        }
        (Ask::Resize { .. }, Reply::Refused(why)) => unchanged(&why),
        (_, Reply::Refused(why)) => fail(&why, exit::REFUSED),
        (_, other @ (Reply::Held { .. } | Reply::Drained { .. } | Reply::Placed { .. })) => {
            fail(&format!("an answer to another question: {other:?}"), exit::REFUSED)
        }
    }
}

fn unchanged(why: &str) -> u8 {
    fail(&format!("the share was not changed: {why}"), exit::REFUSED)
}

fn kept(held: bool) -> &'static str {
    if held { "; held until `shadowslice release`" } else { "" }
}

/// A line for each model that changes.
fn reloaded(report: &ReloadReport) -> String {
    let line = |model: &ModelChange| {
        let ModelChange { name, change, keys, why } = model;
        let keys = if keys.is_empty() { String::new() } else { format!(" ({})", keys.join(", ")) };
        let how = why.as_ref().map(|why| format!(", but not in force: {why}")).unwrap_or_default();
        format!("{name}: {}{keys}{how}\n", change.name())
    };
    let settings = report.settings.iter().map(|key| format!("{key}: changed\n"));
    let lines: String = report.models.iter().map(line).chain(settings).collect();
    format!(
        "{lines}{}: {} changed, {} unchanged",
        report.file.display(),
        report.models.len(),
        report.unchanged
    )
}

fn in_words(report: &HandoverReport) -> String {
    let HandoverReport { outcome, from_percent, from_sms, to_percent, to_sms, stall_us, .. } = report;
    let effect = report
        .effect_ms
        .map(|ms| format!(", first batch at the new share after {}", figures::span(ms / 1e3)));
    format!(
        "{outcome}: {from_percent}% ({from_sms} SMs) -> {to_percent}% ({to_sms} SMs){}, longest stall {}",
        effect.unwrap_or_default(),
        figures::span(stall_us / 1e6)
    )
}

fn as_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}

fn print(text: &str) -> u8 {
    exit::print(&format!("{text}\n"))
}
