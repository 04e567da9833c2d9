//! The judgement as a page.

use crate::criteria::{
    ALIKE, BesideIdeal, Case, DWELL_S, LONG_SETTLED_S, Misled, Misses, Moves, SETTLED_S, by_objective,
};
use crate::evidence::Part;
use crate::judgement::{Judgement, count, worst};
use crate::mixes;
use crate::simulate::{LOADS, OTHER_WORLD, STEADY, Setup, World};
use crate::statistics::{Estimate, Verdict};

/// The whole page.
pub(crate) fn of(judgement: &Judgement, setup: &Setup, state: &str) -> String {
    [
        head(setup, state),
        summary(judgement),
        ideal(judgement),
        misses(judgement),
        misled(judgement),
        moves(judgement),
        baselines(judgement),
    ]
    .join("\n")
}

fn head(setup: &Setup, state: &str) -> String {
    let Setup { first_seed, seeds, seconds, steady_seconds, mixes, .. } = setup;
    let last = first_seed + seeds - 1;
    let shown = setup.shown();
    let command = |world| format!("shadowslice {}", setup.arguments(&shown, world, "LOAD").join(" "));
    let commands = [World::Profiled, World::Steady, World::Told, World::Misled].map(command).join("\n");
    let (title, target, on) = match mixes {
        false => ("", "judge", format!("`{}`", shown.config)),
        true => (" on random mixes", "judge-mixes", "a random mix for each seed".to_owned()),
    };
    let (steady, alike) = (STEADY.join(", "), ALIKE * 100.0);
    let drawn = if *mixes { format!("\n{}\n{OF_MIXES}\n", mixes::described()) } else { String::new() };
    format!(
        "# The judgement of the adaptive policy{title}

What `adaptive` promises, and what it keeps, in [simulation](simulation.md). `make {target}` writes this page; nothing here is
written by hand. Judged: {state}.

All named loads on {on}, seeds {first_seed} to {last}, on which nothing was tuned, {seconds} s each: so long that all of it
takes one core about twenty minutes, and long enough for several hand-overs (which take 1.6 to 8.5 s there) and dwell times ({DWELL_S} s);
steady ones ({steady}) for {steady_seconds} s besides, to see whether they come to rest. Every policy and
the ideal meet the same requests, so all figures are means of differences between pairs, ± half of their 95 % confidence intervals (Student's, over the
seeds). A *margin* is what is left to the limit, in % of the requests offered; below zero the criterion fails. A verdict is that on the mean, with a
question mark where the interval reaches across the limit:

* **met**: the whole interval is on the right side; **met?**: the mean is, not all of the interval
* **not met?**: the mean is on the wrong side, not all of the interval; **not met**: all of it

Who is behind a baseline by at most {alike} % of what is offered, one request in ten thousand, is alike, and meets that criterion.
So many intervals are looked at that one in forty of those of equals lies on the wrong side by chance.
{drawn}
```
{commands}
```
"
    )
}

/// How to read what comes of mixes.
const OF_MIXES: &str = "A priority is judged over the mixes that have it. Mixes differ by far more than the seeds of one do, so intervals are wide, and single runs say more: those below their floor are listed.";

fn summary(judgement: &Judgement) -> String {
    let rows = judgement.criteria().into_iter().map(|(criterion, cases)| {
        let [met, met_perhaps, missed_perhaps, missed] = count(&cases);
        let least = cases.iter().map(|case| case.verdict()).min().unwrap_or(Verdict::Met);
        let by = worst(cases.iter().copied()).map(worst_text).unwrap_or_default();
        vec![
            criterion.to_owned(),
            verdict(least),
            cases.len().to_string(),
            met.to_string(),
            met_perhaps.to_string(),
            missed_perhaps.to_string(),
            missed.to_string(),
            beyond_the_ideal(&cases),
            by,
        ]
    });
    let [ahead, alike, behind] = judgement.by_objective();
    let mut objective = vec![
        "by the lexicographic objective, the first priority in which they clearly differ, below no baseline"
            .to_owned(),
        exact(behind == 0),
    ];
    objective.extend([ahead + alike + behind, ahead + alike, 0, 0, behind].map(|count| count.to_string()));
    let [slow, at_all, soon] = judgement.stillness();
    let moves = [
        (format!("nothing moves after {LONG_SETTLED_S} s of a steady load, the fast path aside"), slow),
        ("nor on the fast path".to_owned(), at_all),
        (format!("nor after {SETTLED_S} s"), soon),
        (
            "never more than one repartition of a model in a dwell time, the fast path aside".to_owned(),
            judgement.dwells(),
        ),
    ];
    let moves = moves.map(|(criterion, met)| vec![criterion, exact(met)]);
    let heads =
        ["criterion", "", "cases", "met", "met?", "not met?", "not met", "nor by the ideal", "worst case"];
    let whole = |mut row: Vec<String>| {
        row.resize(heads.len(), String::new());
        row
    };
    let rows = rows.chain(std::iter::once(objective)).chain(moves).map(whole);
    format!(
        "## In short\n\nA criterion is as good as its worst case. *Nor by the ideal*: of the cases that are not met, or perhaps not, those in which the ideal is clearly
below the baseline, too; who serves higher priorities first has less for lower ones than who does not.\n\n{}\nBy the lexicographic objective adaptive \
is ahead of a baseline in {ahead}, alike in {alike}, and behind in {behind} pairs of a load and a baseline.\n",
        table(&heads, rows)
    )
}

/// The verdict on what has no interval.
fn exact(met: bool) -> String {
    verdict(if met { Verdict::Met } else { Verdict::NotMet })
}

fn beyond_the_ideal(cases: &[&Case]) -> String {
    let beyond = cases.iter().filter(|case| case.is_beyond_the_ideal()).count();
    if cases.iter().any(|case| case.ideal.is_some()) { beyond.to_string() } else { String::new() }
}

fn worst_text(case: &Case) -> String {
    let against = case.against.as_ref().map(|name| format!(", {name}")).unwrap_or_default();
    format!("{} ({}{against}, {})", margin(case.margin), case.load, case.part.text())
}

fn ideal(judgement: &Judgement) -> String {
    let row = |found: &BesideIdeal| {
        vec![
            found.case.load.clone(),
            format!("{:.0}", found.offered_rps),
            format!("{:.2} %", found.ideal_attainment * 100.0),
            found.carried.to_string(),
            format!("{:.4} ± {:.4}", found.ratio.mean, found.ratio.half),
            format!("{:.4}", found.worst_ratio),
            margin(found.case.margin),
            verdict(found.case.verdict()),
        ]
    };
    let heads =
        ["load", "offered/s", "ideal answers", "runs carried", "adaptive / ideal", "worst run", "margin", ""];
    let below = judgement.ideal.iter().flat_map(|found| {
        let load = &found.case.load;
        found.below.iter().map(move |(seed, ratio)| format!("{load} {seed} ({ratio:.3})"))
    });
    let below: Vec<String> = below.collect();
    let below = match below.len() {
        0 => "No single run is below its floor.".to_owned(),
        count => format!("Below its floor are {count} single runs: {}.", below.join(", ")),
    };
    format!(
        "## Beside the ideal\n\nThe ideal carries a run if it answers at least 99.9 % of it in time; there the floor is 0.95 of its goodput, in other runs 0.90.\n\
The margin of a load takes each run by its own floor. {below}\n\n{}",
        table(&heads, judgement.ideal.iter().map(row))
    )
}

fn misses(judgement: &Judgement) -> String {
    let row = |found: &Misses| {
        vec![
            found.case.load.clone(),
            percent(found.own),
            found.case.against.clone().unwrap_or_default(),
            percent(found.best),
            margin(found.case.margin),
            verdict(found.case.verdict()),
        ]
    };
    let heads = ["load", "adaptive", "best baseline", "its misses", "margin", ""];
    format!(
        "## Misses when loads change\n\nBeyond those of the ideal, in % of what is offered. The best baseline is the one that misses least on that load,\n\
of those with adaptive's doors too. The limit is half of its misses or 0.5 %, whichever leaves more.\n\n{}",
        table(&heads, judgement.misses.iter().map(row))
    )
}

fn misled(judgement: &Judgement) -> String {
    let rows = LOADS.iter().zip(&judgement.misled).map(|(load, parts)| {
        let cell = |found: &Misled| {
            format!("{:.4}; {}{}", found.ratio, margin(found.case.margin), mark(found.case.verdict()))
        };
        let worst = parts.iter().map(|found| found.case.verdict()).min().unwrap_or(Verdict::Met);
        [(*load).to_owned()].into_iter().chain(parts.iter().map(cell)).chain([verdict(worst)]).collect()
    });
    let parts = judgement.misled.first().into_iter().flatten().map(|found| found.case.part);
    format!(
        "## Wrong beliefs\n\nThe world differs from the profiles by `{OTHER_WORLD}`. Adaptive's goodput when it is told the profiles over that when it is told the\n\
truth; behind it the margin to 0.95.\n\n{}",
        table_of_parts(&["load"], parts, rows)
    )
}

fn moves(judgement: &Judgement) -> String {
    let row = |name: String, [all, settled, pressed]: [String; 3], moves: &Moves, met: bool| {
        let gap = moves.shortest_s.map_or_else(|| "none moved twice".to_owned(), |gap| format!("{gap:.2} s"));
        vec![name, all, settled, pressed, gap, exact(met)]
    };
    let of_steady = |load: &str, moves: &Moves, after: f64| {
        let counts = [moves.all, moves.settled as u64, moves.pressed as u64].map(|count| count.to_string());
        row(format!("{load}: still after {after} s"), counts, moves, moves.settled == 0)
    };
    let steady = judgement.steady.iter().flat_map(|(load, [short, long])| {
        [of_steady(load, short, SETTLED_S), of_steady(load, long, LONG_SETTLED_S)]
    });
    let worlds = ["as the profiles say", "another, told", "another, misled"];
    let all = worlds.iter().zip(&judgement.moves).map(|(world, moves)| {
        let counts = [moves.all.to_string(), String::new(), String::new()];
        row(format!("all loads, world {world}: one a dwell time"), counts, moves, moves.dwells())
    });
    let heads = ["", "hand-overs", "once settled", "of those under pressure", "shortest gap of a model", ""];
    format!(
        "## Moves\n\nHand-overs of adaptive that came to effect, in all runs together. Steady loads are settled after {SETTLED_S} s in the short runs, and after {LONG_SETTLED_S} s in \
the long ones.\n\
The gap is that before a hand-over of the slow loop: the fast path, under pressure, is free of it. Who never moves meets both criteria, which then say nothing of restraint.\n\n{}",
        table(&heads, steady.chain(all))
    )
}

fn baselines(judgement: &Judgement) -> String {
    let mut text = "## Beside the baselines\n\nAdaptive's goodput less the baseline's, in % of what is offered (to the models of that priority), ± half of the interval.
Bold is not met; a question mark as above. *Objective* is what the lexicographic objective would look at: the first priority in which they clearly
differ, and who is ahead there. So a baseline that is ahead only in lower priorities has taken it from higher ones; where the ideal is clearly behind
it there, too, that is said.\n"
        .to_owned();
    for (load, by_baseline) in LOADS.iter().zip(&judgement.baselines) {
        let rows = by_baseline.iter().map(|cases| baseline_row(cases));
        let parts = by_baseline.first().into_iter().flatten().map(|case| case.part);
        let heads = ["baseline", "objective"];
        text.push_str(&format!("\n### {load}\n\n{}", table_of_parts(&heads, parts, rows)));
    }
    text
}

fn baseline_row(cases: &[Case]) -> Vec<String> {
    let objective = match by_objective(cases) {
        None => "alike".to_owned(),
        Some((part, true)) => format!("ahead in {}", part.text()),
        Some((part, false)) => format!("behind in {}", part.text()),
    };
    let name = cases.first().and_then(|case| case.against.clone()).unwrap_or_default();
    let short = worst(cases).map_or_else(String::new, |case| match case.verdict() {
        met @ (Verdict::Met | Verdict::MetPerhaps) => verdict(met),
        missed => {
            let by = |estimate: Estimate| format!("by {:.2}", -estimate.mean * 100.0);
            let ideal = case.ideal.filter(|_| case.is_beyond_the_ideal());
            let ideal = ideal.map_or_else(String::new, |its| format!("; the ideal {}", by(its)));
            format!("{} {} ({}{ideal})", verdict(missed), by(case.margin), case.part.text())
        }
    });
    let cell = |case: &Case| match case.verdict() {
        Verdict::NotMet => format!("**{}**", margin(case.margin)),
        other => format!("{}{}", margin(case.margin), mark(other)),
    };
    [name, objective].into_iter().chain(cases.iter().map(cell)).chain([short]).collect()
}

/// A table with a column for each part between these and the verdict.
fn table_of_parts(
    heads: &[&str],
    parts: impl Iterator<Item = Part>,
    rows: impl Iterator<Item = Vec<String>>,
) -> String {
    let parts: Vec<String> = parts.map(Part::text).collect();
    let heads: Vec<&str> =
        heads.iter().copied().chain(parts.iter().map(String::as_str)).chain([""]).collect();
    table(&heads, rows)
}

fn table(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let heads: Vec<String> = heads.iter().map(|&head| head.to_owned()).collect();
    let rule = format!("|{}\n", "---|".repeat(heads.len()));
    [line(&heads), rule].into_iter().chain(rows.map(|cells| line(&cells))).collect()
}

fn verdict(verdict: Verdict) -> String {
    match verdict {
        Verdict::Met | Verdict::MetPerhaps => verdict.text().to_owned(),
        Verdict::NotMetPerhaps | Verdict::NotMet => format!("**{}**", verdict.text()),
    }
}

fn mark(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Met => "",
        Verdict::MetPerhaps | Verdict::NotMetPerhaps => " ?",
        Verdict::NotMet => " (not met)",
    }
}

fn margin(estimate: Estimate) -> String {
    format!("{:+.2} ± {:.2}", estimate.mean * 100.0, estimate.half * 100.0)
}

fn percent(estimate: Estimate) -> String {
    format!("{:.3} ± {:.3}", estimate.mean * 100.0, estimate.half * 100.0)
}
