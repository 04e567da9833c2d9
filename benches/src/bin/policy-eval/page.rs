//! The page.

use std::fmt::Write;

use shadowslice_benches::table;

use crate::compare::{BEHIND, Behind, InTime, WORTH, behind, in_time, of_first_priority, ratios, weighted};
use crate::evidence::{AT_REST_FROM_S, Evidence, MOVES_PER_MINUTE, moves_at_rest};
use crate::mixes::described;
use crate::simulate::{BASE, JUDGED, LAYOUT, OPEN, POLICIES, STEADY, STEADY_SECONDS, Setup, Trial, WORLD};

/// The most mixes that the page names for each aim.
const NAMED: usize = 5;

/// Mixes of one kind.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) title: &'static str,
    /// How the files of its mixes begin.
    pub(crate) name: &'static str,
    pub(crate) evidence: Evidence,
}

pub(crate) fn of(sections: &[Section], rest: &[Trial], setup: &Setup, state: &str) -> String {
    let Setup { first_seed, seconds, .. } = setup;
    let mut text = format!(
        "# The judgement of `{JUDGED}`\n\n\
         Simulated beside baselines, in a world of kernels that take turns as was measured on an H200\n\
         ([contention](measurements.md#contention)). `make judge` writes this page; nothing here is written\n\
         by hand.\n\n\
         State: {state}.\n\n\
         {}\n\n\
         Seeds follow one another from {first_seed} on, {seconds} s each; execution and start times differ from\n\
         the profiles (`--truth {WORLD}`). Tables leave out the mixes in which `{BASE}` keeps\n\
         99 % of every model in time.\n\n\
         * *Weighted*: the mean over priorities of the part in time, each counted as {WORTH} of the next\n  \
         one. That is the objective of `{JUDGED}`.\n\
         * *Best layout*: of `{OPEN}` and the layouts that `{JUDGED}` may try, each kept for\n  \
         the whole run with admission, the one that keeps the most in time, weighted.\n\
         * *Bound*: requests as a fluid, the cheapest first, with no queue and no batch that is not full\n  \
         (`benches/simulator/src/bound.rs`). No policy reaches it.\n\n",
        described()
    );
    for section in sections {
        writeln!(
            text,
            "## {}\n\n{}{}",
            section.title,
            compared(section, *seconds),
            no_harm(&section.evidence)
        )
        .expect("a string takes everything");
    }
    text.push_str(&at_rest(rest));
    text
}

fn met(is: bool) -> &'static str {
    if is { "met" } else { "**not met**" }
}

fn percent(part: f64) -> String {
    format!("{:.1}", part * 100.0)
}

fn compared(section: &Section, seconds: u32) -> String {
    let trials = &section.evidence.hard;
    let Some(ratios) = ratios(trials) else { return "No mix had anything to help.\n\n".to_owned() };
    let row = |policy: &str| -> Option<Vec<String>> {
        let InTime { all, first, weighted, behind } = in_time(trials, policy)?;
        Some(vec![format!("`{policy}`"), percent(all), percent(first), percent(weighted), percent(behind)])
    };
    let rows = POLICIES.iter().filter_map(|policy| row(policy));
    let heads =
        ["policy", "in time %", "first priority %", "weighted %", "behind the best layout at worst, points"];
    let behind = behind(trials);
    let mut text = format!(
        "{} mixes.\n\n{}\n\
         `{JUDGED}` ÷ best layout, weighted: {} %. `{JUDGED}` ÷ bound, requests: {} %.\n\n\
         **At most {} point behind the best layout, weighted** ({}): further behind in {} mixes.\n\n",
        trials.len(),
        table(&heads, rows),
        percent(ratios.best_layout),
        percent(ratios.bound),
        BEHIND * 100.0,
        met(behind.is_empty()),
        behind.len(),
    );
    for behind in behind.iter().take(NAMED) {
        writeln!(text, "* {}", one_behind(behind)).expect("a string takes everything");
    }
    if !behind.is_empty() {
        let config = format!("target/judgement/{}-SEED.yaml", section.name);
        writeln!(
            text,
            "\nTo see one again: `shadowslice-simulate {config} --load LOAD --utilisation PART --seed SEED\n\
             --seconds {seconds} --truth {WORLD} --no-interference --policy {JUDGED} layouts`\n"
        )
        .expect("a string takes everything");
    }
    text
}

fn one_behind(behind: &Behind<'_>) -> String {
    let Behind { trial, best, judged } = behind;
    let layout = best.policy.strip_prefix(LAYOUT).unwrap_or(&best.policy);
    format!(
        "{}: {} % weighted ({} % of the first priority),\n  `{layout}` {} % ({} %)",
        trial.mix,
        percent(weighted(judged)),
        percent(of_first_priority(judged)),
        percent(weighted(best)),
        percent(of_first_priority(best)),
    )
}

fn no_harm(evidence: &Evidence) -> String {
    let harmed = evidence.harmed();
    let mut text = format!(
        "**No harm** ({}): of {} mixes in which `{BASE}` keeps 99 % or more of every model\n\
         in time, {} lose more than 0.3 points, or have requests refused, or a median over 1.1 times + 0.5 ms.\n",
        met(harmed.is_empty()),
        evidence.easy.len(),
        harmed.len(),
    );
    for (at, harm) in harmed.into_iter().take(NAMED).enumerate() {
        let slower = harm.slower.map(|(model, ms)| format!(", {model}'s median {ms:.1} ms over that"));
        writeln!(
            text,
            "{}* {}: {:.2} points fewer in time, {} refused{}",
            if at == 0 { "\n" } else { "" },
            harm.mix,
            harm.less * 100.0,
            harm.refused,
            slower.unwrap_or_default()
        )
        .expect("a string takes everything");
    }
    text
}

fn at_rest(trials: &[Trial]) -> String {
    let moves = moves_at_rest(trials, f64::from(STEADY_SECONDS));
    let mean = moves.iter().sum::<f64>() / moves.len().max(1) as f64;
    let mut most: Vec<(f64, &Trial)> = moves.into_iter().zip(trials).collect();
    most.retain(|(moves, _)| *moves >= MOVES_PER_MINUTE);
    most.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let mut text = format!(
        "## At rest\n\n\
         **Fewer than {MOVES_PER_MINUTE} change a minute** ({}): under `{STEADY}`, from {AT_REST_FROM_S} s after the start on, {} of {}\n\
         mixes change more shares than that. On average there are {mean:.2} changes a minute.\n",
        met(most.is_empty()),
        most.len(),
        trials.len(),
    );
    for (at, (moves, trial)) in most.into_iter().take(NAMED).enumerate() {
        let gap = if at == 0 { "\n" } else { "" };
        writeln!(text, "{gap}* {}: {moves:.1}", trial.mix).expect("a string takes everything");
    }
    text
}
