//! The page that the evaluation writes.

use std::fmt::Write;

use shadowslice_benches::table;

use crate::compare::{BEHIND, Behind, InTime, WORTH, behind, in_time, of_first_priority, ratios, weighted};
use crate::evidence::{AT_REST_FROM_S, Evidence, MOVES_PER_MINUTE, moves_at_rest};
use crate::mixes::described;
use crate::simulate::{BASE, JUDGED, LAYOUT, OPEN, POLICIES, STEADY, STEADY_SECONDS, Setup, Trial, WORLD};

/// The number of mixes that the page lists for each target, at most.
const NAMED: usize = 2;

/// Mixes of one kind.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) title: &'static str,
    /// The first part of the names of its mixes' files.
    pub(crate) name: &'static str,
    pub(crate) evidence: Evidence,
}

/// Returns the text of the page. Its lines stay within 100 columns for the mixes that are drawn today.
pub(crate) fn of(sections: &[Section], rest: &[Trial], setup: &Setup, state: &str) -> String {
    let Setup { first_seed, seconds, runs, .. } = setup;
    let runs = runs.display();
    let mut text = format!(
        "# Evaluation of `{JUDGED}`\n\n\
         The policy `{JUDGED}` and other policies, simulated on random mixes of models. Kernels take turns\n\
         as on an H200 ([contention](measurements.md#contention)). `make judge` writes this page.\n\n\
         State: {state}.\n\n\
         {}\n\n\
         Runs take {seconds} s, with seeds from {first_seed} on. Execution and start times differ from the profiles\n\
         (`--truth {WORLD}`). A mix is *easy* if `{BASE}` serves 99 % of each model's\n\
         requests in time. The tables contain the other mixes.\n\n\
         * **Weighted**: the mean percentage in time over priorities, in which each priority counts {WORTH} times\n  \
         as much as the next lower one. `{JUDGED}` maximises it.\n\
         * **Best layout**: the best weighted result of `{OPEN}` and all layouts that `{JUDGED}`\n  \
         may try, each used with admission control for a whole run. **Gap**: the points that are missing.\n\
         * **Bound**: a fluid model with full batches and no queue that serves the cheapest requests first\n  \
         (`benches/simulator/src/bound.rs`). No policy reaches it.\n\
         * **Harm**: in an easy mix, `{JUDGED}` loses more than 0.3 points, refuses requests, or exceeds\n  \
         1.1 times the median of `{BASE}` plus 0.5 ms.\n\n\
         Lists show the worst mixes: weighted (highest priority). To repeat a run (KIND is in the title):\n\n\
         ```sh\n\
         shadowslice-simulate {runs}/KIND-SEED.yaml --load LOAD --seed SEED \\\n  \
         --utilisation PART --seconds {seconds} --truth {WORLD} --no-interference \\\n  \
         --policy {JUDGED} layouts\n\
         ```\n\n",
        described()
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

fn met(is: bool) -> &'static str {
    if is { "met" } else { "**missed**" }
}

fn percent(part: f64) -> String {
    format!("{:.1}", part * 100.0)
}

fn compared(section: &Section) -> String {
    let trials = &section.evidence.hard;
    let Some(ratios) = ratios(trials) else {
        return format!("`{BASE}` serves every mix in time.\n\n");
    };
    let row = |policy: &str| -> Option<Vec<String>> {
        let InTime { all, first, weighted, behind } = in_time(trials, policy)?;
        Some(vec![format!("`{policy}`"), percent(all), percent(first), percent(weighted), percent(behind)])
    };
    let rows = POLICIES.iter().filter_map(|policy| row(policy));
    let heads = ["policy", "in time %", "highest priority %", "weighted %", "largest gap"];
    let behind = behind(trials);
    let mut text = format!(
        "{} mixes.\n\n{}\n\
         `{JUDGED}` reaches {} % of the best layout (weighted) and {} % of the bound (requests).\n\n\
         **Gaps of at most {} point** ({}): {} mixes have a larger one.\n\n",
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
        text.push('\n');
    }
    text
}

fn one_behind(behind: &Behind<'_>) -> String {
    let Behind { trial, best, judged } = behind;
    let layout = best.policy.strip_prefix(LAYOUT).unwrap_or(&best.policy);
    format!(
        "{}: {} % ({} %), `{layout}` {} % ({} %)",
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
        "**No harm** ({}): {} of {} easy mixes are harmed.\n",
        met(harmed.is_empty()),
        harmed.len(),
        evidence.easy.len(),
    );
    for (at, harm) in harmed.into_iter().take(NAMED).enumerate() {
        let slower = harm.slower.map(|(model, ms)| format!(",\n  median of {model} {ms:.1} ms too long"));
        writeln!(
            text,
            "{}* {}: {:.2} points fewer in time, {} requests refused{}",
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
        "## Steady load\n\n\
         **Fewer than {MOVES_PER_MINUTE} share change a minute** ({}): under `{STEADY}`, from {AT_REST_FROM_S} s after the start,\n\
         {} of {} mixes change shares more often. The mean is {mean:.2} changes a minute.\n",
        met(most.is_empty()),
        most.len(),
        trials.len(),
    );
    for (at, (moves, trial)) in most.into_iter().take(NAMED).enumerate() {
        let gap = if at == 0 { "\n" } else { "" };
        writeln!(text, "{gap}* {}: {moves:.1} changes a minute", trial.mix)
            .expect("a string takes everything");
    }
    text
}
