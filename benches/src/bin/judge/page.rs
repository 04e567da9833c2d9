//! The page.

use std::fmt::Write;

use shadowslice_benches::table;

use crate::evidence::{AT_REST_FROM_S, Evidence, InTime, MOVES_PER_MINUTE, in_time, moves_at_rest};
use crate::mixes::described;
use crate::simulate::{
    BASE, FOUND, JUDGED, Mechanism, POLICIES, SLICES, STEADY, STEADY_SECONDS, Setup, Trial, WORLD,
};

/// How much less may be in time than under the best of the other policies, of all requests,
const LESS_THAN_BEST: f64 = 0.005;

/// and how much more than without any policy must be, of the highest priority's.
const MORE_OF_FIRST: f64 = 0.05;

pub(crate) fn of(judged: &[(Mechanism, Evidence)], rest: &[Trial], setup: &Setup, state: &str) -> String {
    let Setup { first_seed, mixes, seconds, .. } = setup;
    let mut text = format!(
        "# The judgement of `{JUDGED}`\n\n\
         Simulated beside baselines, in a world of kernels that take turns as was measured on an H200\n\
         ([contention](measurements.md#contention)). `make judge` writes this page; nothing here is written\n\
         by hand.\n\n\
         State: {state}.\n\n\
         {}\n\n\
         {mixes} mixes from seed {first_seed} on, {seconds} s each; execution and start times differ from the\n\
         profiles (`--truth {WORLD}`). *{FOUND}*: shares that never change,\n\
         found for each mix by trying 75, 50 and 25 % for one model after the other on the very same\n\
         requests. *{SLICES}*: no MPS.\n\n",
        described()
    );
    let mut add = |part: String| text.push_str(&part);
    for (mechanism, evidence) in judged {
        add(format!("## Shares change {}\n\n", how(*mechanism)));
        add(no_harm(evidence));
        add(help(evidence));
    }
    add(at_rest(rest));
    text
}

fn how(mechanism: Mechanism) -> &'static str {
    match mechanism {
        Mechanism::InProcess => "in-process",
        Mechanism::Shadow => "by shadows",
    }
}

fn met(is: bool) -> &'static str {
    if is { "met" } else { "**not met**" }
}

fn no_harm(evidence: &Evidence) -> String {
    let harmed = evidence.harmed();
    let mut text = format!(
        "**No harm** ({}): of {} mixes in which `{BASE}` keeps 99 % or more of every model\n\
         in time, {} lose more than 0.3 %, or have requests refused, or a median over 1.1 times + 0.5 ms.\n\n",
        met(harmed.is_empty()),
        evidence.easy.len(),
        harmed.len(),
    );
    for harm in harmed {
        let slower = harm.slower.map(|(model, ms)| format!(", {model}'s median {ms:.1} ms over that"));
        writeln!(
            text,
            "* seed {}: {:.2} % fewer in time, {} refused{}",
            harm.seed,
            harm.less * 100.0,
            harm.refused,
            slower.unwrap_or_default()
        )
        .expect("a string takes everything");
    }
    text.push('\n');
    text
}

fn help(evidence: &Evidence) -> String {
    let all: Vec<(&str, InTime)> = POLICIES
        .iter()
        .chain(&[FOUND, SLICES])
        .filter_map(|&policy| Some((policy, in_time(&evidence.hard, policy)?)))
        .collect();
    let of = |name: &str| all.iter().find(|(policy, _)| *policy == name).map(|(_, kept)| *kept);
    let (Some(ours), Some(base)) = (of(JUDGED), of(BASE)) else { return String::new() };
    let best =
        all.iter().filter(|(policy, _)| *policy != JUDGED).map(|(_, kept)| kept.all).fold(0.0, f64::max);
    let rows = all.iter().map(|(policy, kept)| {
        let percent = |part: f64| format!("{:.1}", part * 100.0);
        let easy = in_time(&evidence.easy, policy)
            .map_or_else(|| "-".to_owned(), |kept| format!("{:.2}", kept.all * 100.0));
        vec![format!("`{policy}`"), percent(kept.all), percent(kept.first), easy]
    });
    format!(
        "**Help**: in the other {} mixes, all in all at least the best of the others less 0.5 %\n\
         ({}); of the highest priority 5 % more than `{BASE}` ({}).\n\n{}\n",
        evidence.hard.len(),
        met(ours.all >= best - LESS_THAN_BEST),
        met(ours.first >= base.first + MORE_OF_FIRST),
        table(&["policy", "in time %", "of the highest priority %", "in the easy mixes %"], rows)
    )
}

fn at_rest(trials: &[Trial]) -> String {
    let (most, mean) = moves_at_rest(trials, f64::from(STEADY_SECONDS));
    format!(
        "## At rest\n\n\
         **Nothing moves** ({}): under `{STEADY}`, {AT_REST_FROM_S} s after the start, there are {mean:.2}\n\
         changes a minute on average over all mixes, and {most:.1} in the mix that has most; {MOVES_PER_MINUTE} may be.\n",
        met(most <= MOVES_PER_MINUTE)
    )
}
