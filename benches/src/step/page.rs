//! The steps as a page.

use std::collections::BTreeMap;

use crate::machine::Machine;
use crate::spread::Spread;
use crate::step::case::{SLO, SMS, Standby};
use crate::step::orders::Sign;
use crate::step::round::{Grown, Round, STANDING_MS, STARTING_MS, Trial};
use crate::table;

/// The whole page.
pub(super) fn of(trials: &[Trial], rounds: u32, seed: u64) -> String {
    let Machine { cpu, cores, kernel, date, commit, .. } = Machine::here();
    let slo = SLO.as_millis();
    format!(
        "# From a step in demand to a larger share

How soon a model has more when more comes, end to end: `shadowslice serve` under `policy: adaptive` on emulated GPUs of {SMS} SMs, and clients over gRPC on a \
Unix socket that send at random times, or *evenly* spaced, whether or not earlier requests were answered. `make step` writes this page; nothing here is written by hand.

{cpu}, {cores} cores that hold supervisor, workers and client, Linux {kernel}, no GPU. {date}, commit {commit}.

A case is run {rounds} times (seed {seed}), each time with a model and a GPU of its own. Its SLO is {slo} ms, its worker starts in 1.6 s by its profile. The base rate lasts \
until the share has shrunk and, with `standby: auto`, a worker stands ready with all that the model may have; then the rate steps up at once. A model that has come to rest \
with all that it may have is left out, so a case may have fewer rounds.

* **times**: the rate after the step / what the share in force carries, as the policy counts it: batches that take two thirds of the SLO at most, nine tenths of the time.
* **least**: what detecting it takes on average for any test of independent arrivals that errs once a day, even one that is told both rates (Lorden 1971); the policy's errs as seldom and is told one of them.
* **detect**: from the step, on the client's clock, to the policy's order in the supervisor's log. *By itself* is what the supervisor takes it for, which counts from when the change showed.
* **effect**: from the order to the first batch done at the new share, as the supervisor reports it.
* **start**: the start and warm-up of the worker that serves then, as it reports them. One that stood ready had that behind it.

The aims, of detect + effect: with a standing worker less than {STANDING_MS:.0} ms, without less than {STARTING_MS:.0} ms more than the start. They are *met* where most rounds keep them. \
Figures are the median, with the smallest and the largest in brackets.

{}",
        tables(trials)
    )
}

/// All figures.
pub(super) fn tables(trials: &[Trial]) -> String {
    [standing(trials), starting(trials), clients(trials), signs(trials)].join("\n")
}

fn of_standby(trials: &[Trial], standby: Standby) -> impl Iterator<Item = &Trial> {
    trials.iter().filter(move |trial| trial.case.standby == standby)
}

fn standing(trials: &[Trial]) -> String {
    let rows = of_standby(trials, Standby::Auto).map(|trial| {
        let mut cells = what(trial);
        cells.extend([
            trial.case.least_ms().map_or_else(|| "-".to_owned(), |least| format!("{least:.0}")),
            over(trial, |grown| grown.detect_ms),
            over(trial, |grown| grown.seen_ms),
            over(trial, |grown| grown.effect_ms),
            over(trial, Grown::sum_ms),
        ]);
        cells.extend(verdict(trial));
        cells
    });
    let heads = [
        "requests/s",
        "SMs",
        "times",
        "least ms",
        "detect ms",
        "by itself",
        "effect ms",
        "sum ms",
        "within the aim",
        "",
    ];
    format!("## With a standing worker\n\n{}", table(&heads, rows))
}

fn starting(trials: &[Trial]) -> String {
    let rows = of_standby(trials, Standby::Off).map(|trial| {
        let mut cells = what(trial);
        cells.extend([
            over(trial, |grown| grown.detect_ms),
            over(trial, |grown| grown.seen_ms),
            over(trial, |grown| grown.effect_ms),
            over(trial, |grown| grown.start_ms),
            over(trial, |grown| grown.judged_ms(Standby::Off)),
        ]);
        cells.extend(verdict(trial));
        cells
    });
    let heads = [
        "requests/s",
        "SMs",
        "times",
        "detect ms",
        "by itself",
        "effect ms",
        "start ms",
        "sum - start ms",
        "within the aim",
        "",
    ];
    format!("## Without\n\n{}", table(&heads, rows))
}

/// The load, the shares, and how much too small they were.
fn what(trial: &Trial) -> Vec<String> {
    let case = &trial.case;
    let before = |round: &Round| f64::from(round.sms);
    let to = trial.grown().map(|grown| f64::from(grown.to_sms));
    let times = |round: &Round| case.step / case.carried_by(round.sms);
    vec![
        case.rates(),
        format!("{} -> {}", range(trial.rounds.iter().map(before)), range(to)),
        spread(trial.rounds.iter().map(times), Spread::tenths),
    ]
}

fn verdict(trial: &Trial) -> [String; 2] {
    let (within, valid) = (trial.within(), trial.valid());
    let met = if trial.met() { "met" } else { "**not met**" };
    [format!("{within} of {valid}"), met.to_owned()]
}

fn clients(trials: &[Trial]) -> String {
    let rows = trials.iter().map(|trial| {
        let count = |count: fn(&Round) -> f64| spread(trial.rounds.iter().map(count), Spread::whole);
        vec![
            trial.case.to_string(),
            count(|round| f64::from(round.clients.offered)),
            count(|round| f64::from(round.clients.late)),
            count(|round| f64::from(round.clients.refused)),
            count(|round| f64::from(round.clients.failed)),
            spread(trial.rounds.iter().map(|round| round.clients.sent_late_ms), Spread::tenths),
        ]
    });
    let heads = ["case", "offered", "late", "refused", "failed", "sent late ms (p99)"];
    format!(
        "## The clients\n\nRequests in the second after the step: answered after the SLO, refused, or answered wrongly or not at all. How late the client \
         itself sent them says whether the machine had time.\n\n{}",
        table(&heads, rows)
    )
}

fn signs(trials: &[Trial]) -> String {
    let rows = trials.iter().map(|trial| {
        let mut signs: BTreeMap<&Sign, u32> = BTreeMap::new();
        trial.grown().for_each(|grown| *signs.entry(&grown.sign).or_default() += 1);
        let signs: Vec<String> = signs.iter().map(|(sign, times)| format!("{sign}: {times}")).collect();
        let unanswered = trial.valid() - trial.grown().count();
        let before = trial.rounds.len() - trial.valid();
        let arrivals = spread(trial.grown().map(|grown| f64::from(grown.arrivals)), Spread::whole);
        vec![trial.case.to_string(), signs.join("; "), arrivals, unanswered.to_string(), before.to_string()]
    });
    let heads =
        ["case", "what showed it", "requests until the order", "never ordered", "ordered before the step"];
    format!(
        "## Signs\n\nA change of rate takes some requests to be sure of, the more the smaller it is, and those take the longer the fewer \
         come. An order before the step is a false alarm at the base rate; such rounds count no further.\n\n{}",
        table(&heads, rows)
    )
}

fn over(trial: &Trial, figure: impl Fn(&Grown) -> f64) -> String {
    spread(trial.grown().map(figure), Spread::tenths)
}

fn spread(values: impl Iterator<Item = f64>, shown: fn(Spread) -> String) -> String {
    let values: Vec<f64> = values.collect();
    if values.is_empty() { "-".to_owned() } else { shown(Spread::of(values.into_iter())) }
}

/// The smallest and the largest, or the only one.
fn range(values: impl Iterator<Item = f64>) -> String {
    let show = |Spread { min, max, .. }: Spread| {
        if min == max { format!("{min:.0}") } else { format!("{min:.0} .. {max:.0}") }
    };
    spread(values, show)
}
