//! Runs a case: a supervisor with a GPU and a model for each round, so that all shares shrink in the same time. Then the loads
//! step up one after the other.

use std::fs;
use std::time::Duration;

use shadowslice_tests::home::{Error, Home};
use shadowslice_tests::server::Server;
use shadowslice_tests::status::{Model, Worker};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::Failure;
use crate::step::case::{Case, SMS, Standby, name};
use crate::step::load::Load;
use crate::step::orders::to_grow;
use crate::step::round::{AFTER, Round};

/// How long anything may take that the supervisor does by itself.
const PATIENCE: Duration = Duration::from_secs(120);

/// In so long all shares should shrink. A model that wanted no less for a while keeps what it has, and one to which about half as much comes as
/// all of that carries may want no less by chance: its round is left out.
const SHRUNK_WITHIN: Duration = Duration::from_secs(40);

/// Where no worker stands ready, a share that has changed stays for so long, whatever comes; so the steps come later.
const DWELL: Duration = Duration::from_secs(5);

/// All rounds of a case.
pub(super) async fn run(case: &Case, rounds: u32, seed: u64) -> Result<Vec<Round>, Failure> {
    let mut home = Home::with_config(&case.config(rounds))?;
    home.write("profile.yaml", case.profile())?;
    home.set_env("SHADOWSLICE_LOG", "json");
    home.set_patience(PATIENCE);
    let server = Server::ready(home).await?;
    let begin = |number| {
        let seed = seed + u64::from(number);
        (name(number), Load::begin(server.client(), name(number), (case.base, case.arrivals), seed))
    };
    let loads: Vec<(String, Load)> = (0..rounds).map(begin).collect();
    let loads = shrunk(&server, case, loads).await?;
    if case.standby == Standby::Off {
        sleep_until(Instant::now() + DWELL).await;
    }
    let mut found = Vec::new();
    for (model, load) in loads {
        let round = step(&server, case, &model, load).await?;
        eprintln!("{case}: {round}");
        found.push(round);
    }
    server.stop().await?;
    Ok(found)
}

/// The loads of models whose shares have shrunk; the others end.
async fn shrunk(
    server: &Server,
    case: &Case,
    loads: Vec<(String, Load)>,
) -> Result<Vec<(String, Load)>, Failure> {
    let (until, mut shrunk) = (Instant::now() + SHRUNK_WITHIN, Vec::new());
    for (model, load) in loads {
        let waiting =
            server.wait_status(&model, "a smaller share that is in force", |model| has_shrunk(model, case));
        let has_shrunk = match timeout_at(until, waiting).await {
            Ok(waited) => waited.map(|_| true)?,
            Err(_) => has_shrunk(&server.model(&model).await?, case),
        };
        if has_shrunk {
            shrunk.push((model, load));
        } else {
            eprintln!("{case}: {model} keeps all that it may have, and is left out");
        }
    }
    if shrunk.is_empty() { Err("no share has shrunk".into()) } else { Ok(shrunk) }
}

/// Whether its share shrank, nothing of that is left to be done, and the worker that should stand ready does.
fn has_shrunk(model: &Model, case: &Case) -> bool {
    let wanted: &[(&str, &str)] = match case.standby {
        Standby::Auto => &[("incumbent", "serving"), ("standby", "standing")],
        Standby::Off => &[("incumbent", "serving")],
    };
    let is = |worker: &Worker, (role, phase): (&str, &str)| {
        worker.role == role && worker.more.get("phase").is_some_and(|found| found == phase)
    };
    model.sms < SMS
        && model.workers.len() == wanted.len()
        && wanted.iter().all(|&wanted| model.workers.iter().any(|worker| is(worker, wanted)))
}

/// Steps one load up, and waits for what comes of it. Nobody asks for the status in the second after the step.
async fn step(server: &Server, case: &Case, model: &str, load: Load) -> Result<Round, Failure> {
    let before = server.model(model).await?.sms;
    load.step(case.step)?;
    sleep_until(Instant::now() + AFTER).await;
    let has_grown = |model: &Model| {
        model.sms > before && model.handovers.last.as_ref().is_some_and(|last| last.effect_ms.is_some())
    };
    let grown = match server.wait_status(model, "a larger share", has_grown).await {
        Ok(model) => Some(model),
        Err(Error::TooLate { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let done = load.end().await?;
    let log = server.home().log_path();
    let log = fs::read_to_string(log).map_err(|error| format!("cannot read {}: {error}", log.display()))?;
    Ok(Round::of(before, &done, &to_grow(&log, model), grown.as_ref()))
}
