//! The page with the results of the evaluation.

use std::fmt::Write;

use crate::report::{number, table, verdict};

use super::compare::{
    InTimeRates, LayoutGap, MAX_GAP, PRIORITY_WEIGHT, gaps, in_time, of_first_priority, ratios, weighted,
};
use super::evidence::{AT_REST_FROM_S, Evidence, MOVES_PER_MINUTE, moves_at_rest};
use super::mixes::description;
use super::simulate::{
    BASE, EVALUATED, LAYOUT, MixRuns, OPEN, POLICIES, STEADY, STEADY_SECONDS, Setup, WITHOUT_PREEMPTION,
    WORLD,
};

/// The maximum number of mixes that the page lists for each target.
const LISTED: usize = 2;

/// The section of the page about one kind of mix.
#[derive(Debug)]
pub(crate) struct PageSection {
    pub(crate) title: &'static str,
    /// The prefix of the names of the files of these mixes.
    pub(crate) name: &'static str,
    pub(crate) evidence: Evidence,
}

/// Returns the text of the page. With the mixes that the default seeds draw, no line exceeds 100
/// columns.
pub(crate) fn of(sections: &[PageSection], rest: &[MixRuns], setup: &Setup, state: &str) -> String {
    let Setup { first_seed, seconds, runs, .. } = setup;
    let runs = runs.display();
    let mut text = format!(
        "# Evaluation of `{EVALUATED}`\n\n\
         This page compares `{EVALUATED}` with other policies in simulations of random mixes of models. Kernels\n\
         take turns as on an H200 ([contention](measurements.md#contention)). `make policy-eval` writes this\n\
         page.\n\n\
         State: {state}.\n\n\
         {}\n\n\
         Each run simulates {seconds} s. Seeds start at {first_seed}. Execution and start times differ from the\n\
         profiles (`--truth {WORLD}`). A mix is *easy* if `{BASE}` answers 99 %\n\
         of each model's requests in time. The tables omit easy mixes.\n\n\
         * **Weighted**: the mean of the percentages in time of all priorities, each with \
         {PRIORITY_WEIGHT} times the weight\n  \
         of the next lower priority. `{EVALUATED}` maximises this mean.\n\
         * **`{WITHOUT_PREEMPTION}`**: no batch waits between two pieces for another model's batch.\n\
         * **Best layout**: the best weighted result of `{OPEN}` and all layouts that\n  \
         `{EVALUATED}` may try. Each layout stays for a whole run, with admission control. **Gap**: the\n  \
         best layout's weighted result minus the policy's, in percentage points.\n\
         * **Bound**: the requests in time of a fluid model with full batches and no queue\n  \
         (`benches/simulator/src/bound.rs`). No policy reaches this bound.\n\
         * **Harm**: in an easy mix, `{EVALUATED}` answers over 0.3 points fewer requests in time\n  \
         than `{BASE}`, refuses requests, or exceeds a model's limit for the median latency:\n  \
         1.1 times its median under `{BASE}`, plus 0.5 ms.\n\n\
         Targets are bold. The lists show the worst mixes (load at utilisation), with the weighted\n\
         percentages of `{EVALUATED}` and of the best layout (highest priority in brackets). To repeat a run\n\
         (KIND is in the section's title):\n\n\
         ```sh\n\
         shadowslice-simulate {runs}/KIND-SEED.yaml --load LOAD --seed SEED \\\n  \
         --utilisation PART --seconds {seconds} --truth {WORLD} --no-interference \\\n  \
         --policy {EVALUATED} layouts\n\
         ```\n\n",
        description()
    );
    for section in sections {
        writeln!(
            text,
            "## {} (`{}`)\n\n{}{}",
            section.title,
            section.name,
            compared(section),
            no_harm(&section.evidence)
        )
        .expect("a string takes everything");
    }
    text.push_str(&at_rest(rest));
    text
}

fn percent(part: f64) -> String {
    number(part * 100.0, 1)
}

fn compared(section: &PageSection) -> String {
    let trials = &section.evidence.hard;
    let Some(ratios) = ratios(trials) else {
        return "All mixes are easy.\n\n".to_owned();
    };
    let row = |policy: &str| -> Option<Vec<String>> {
        let InTimeRates { all, first, weighted, largest_gap } = in_time(trials, policy)?;
        Some(vec![
            format!("`{policy}`"),
            percent(all),
            percent(first),
            percent(weighted),
            percent(largest_gap),
        ])
    };
    let rows = POLICIES.iter().filter_map(|policy| row(policy));
    let heads = ["policy", "in time %", "highest priority %", "weighted %", "largest gap"];
    let gaps = gaps(trials);
    let mut text = format!(
        "{} mixes are not easy.\n\n{}\n\
         On average, `{EVALUATED}` reaches {} % of the best layout (weighted) and {} % of the bound.\n\n\
         **Gaps of at most {} point** ({}): {} mixes have a larger gap.\n\n",
        trials.len(),
        table(&heads, rows),
        percent(ratios.best_layout),
        percent(ratios.bound),
        MAX_GAP * 100.0,
        verdict(gaps.is_empty()),
        gaps.len(),
    );
    for gap in gaps.iter().take(LISTED) {
        writeln!(text, "* {}", gap_line(gap)).expect("a string takes everything");
    }
    if !gaps.is_empty() {
        text.push('\n');
    }
    text
}

fn gap_line(gap: &LayoutGap<'_>) -> String {
    let LayoutGap { trial, best, evaluated } = gap;
    let layout = best.policy.strip_prefix(LAYOUT).unwrap_or(&best.policy);
    format!(
        "{}: {} % ({} %), `{layout}` {} % ({} %)",
        trial.mix,
        percent(weighted(evaluated)),
        percent(of_first_priority(evaluated)),
        percent(weighted(best)),
        percent(of_first_priority(best)),
    )
}

fn no_harm(evidence: &Evidence) -> String {
    let harmed = evidence.harmed();
    let mut text = format!(
        "**No harm** ({}): `{EVALUATED}` harms {} of {} easy mixes.\n",
        verdict(harmed.is_empty()),
        harmed.len(),
        evidence.easy.len(),
    );
    for (at, harm) in harmed.into_iter().take(LISTED).enumerate() {
        let slower = harm
            .slower
            .map(|(model, ms)| format!(", median latency of `{model}` {ms:.1} ms above the limit"));
        writeln!(
            text,
            "{}* {}: {:.2} points fewer requests in time,\n  {} requests refused{}",
            if at == 0 { "\n" } else { "" },
            harm.mix,
            harm.loss * 100.0,
            harm.refused,
            slower.unwrap_or_default()
        )
        .expect("a string takes everything");
    }
    text
}

fn at_rest(trials: &[MixRuns]) -> String {
    let moves = moves_at_rest(trials, f64::from(STEADY_SECONDS));
    let mean = moves.iter().sum::<f64>() / moves.len().max(1) as f64;
    let mut most: Vec<(f64, &MixRuns)> = moves.into_iter().zip(trials).collect();
    most.retain(|(moves, _)| *moves >= MOVES_PER_MINUTE);
    most.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let mut text = format!(
        "## Steady load\n\n\
         **Fewer than {MOVES_PER_MINUTE} share change a minute** ({}): under `{STEADY}`, from {AT_REST_FROM_S} s after the start,\n\
         {} of {} mixes exceed this rate. The mean is {mean:.2} changes a minute.\n",
        verdict(most.is_empty()),
        most.len(),
        trials.len(),
    );
    for (at, (moves, trial)) in most.into_iter().take(LISTED).enumerate() {
        let gap = if at == 0 { "\n" } else { "" };
        writeln!(text, "{gap}* {}: {moves:.1} changes a minute", trial.mix)
            .expect("a string takes everything");
    }
    text
}
