//! The page with the comparison of simulated and real runs.

use crate::report::{Report, number, spread, table, verdict};
use crate::spread::Spread;

use super::SimVsRealOptions;
use super::agreement::{Agreement, GOODPUT_TOLERANCE, P99_TOLERANCE, Pair, Pairs, REPARTITIONS_TOLERANCE};
use super::arrivals::{LEAD, PHASES_MS};
use super::real::ReplayResult;

pub(crate) fn report(agreements: &[Agreement], options: &SimVsRealOptions) -> Report {
    let SimVsRealOptions { seconds, rounds, utilisation, seed, config, .. } = options;
    let (config, lead) = (config.display(), LEAD.as_secs_f64());
    let (phases, last_phase) = (PHASES_MS.len(), PHASES_MS.iter().max().unwrap_or(&0));
    let about = format!(
        "\
The predictions of `shadowslice-simulate` and the results of `shadowslice serve` with the emulated device. Both use the configuration `{config}`,
on which nothing was tuned or calibrated, and the same arrivals. Requests go over gRPC and a Unix socket in an open loop. Shares change
by a shadow or in-process. `make sim-vs-real` and `make bench` write this page; do not edit it."
    );
    let method = format!(
        "\
Each load is drawn once: seed {seed}, utilisation {utilisation}, {seconds} s. It begins after {lead} s in which the supervisor starts and its policy makes its first decisions.
The load is simulated with `--no-interference`, and sent to {rounds} new supervisors; the cases take turns. Goodput counts requests answered within their SLO.
Latency is the time from the scheduled arrival to the last byte.

* **real**: the median over the quiet rounds, with the smallest and the largest in brackets. A round is *quiet* if other programs used at most 10 % of the machine.
  Without quiet rounds, all rounds count.
* **simulated**: the median and the range over {phases} phases. The time between the supervisor's intervals and the requests is known to about {last_phase} ms only, so
  each load is simulated with shifts of 0 to {last_phase} ms.

The targets for the medians: goodput within {:.0} %, p99 of all answers within {:.0} %, repartitions within {REPARTITIONS_TOLERANCE:.0}.",
        GOODPUT_TOLERANCE * 100.0,
        P99_TOLERANCE * 100.0,
    );
    Report {
        title: "Simulator and supervisor compared",
        about,
        processes: "supervisor, workers and client",
        method,
        results: tables(agreements),
    }
}

pub(crate) fn tables(agreements: &[Agreement]) -> String {
    [summary(agreements), cases(agreements), models(agreements), rounds(agreements)].join("\n")
}

fn summary(agreements: &[Agreement]) -> String {
    let names = ["goodput", "p99", "repartitions"];
    let rows = names.into_iter().enumerate().map(|(target, name)| {
        let met = agreements.iter().filter(|agreement| agreement.all.met()[target]).count();
        let missed: Vec<String> = agreements
            .iter()
            .filter(|agreement| !agreement.all.met()[target])
            .map(|agreement| agreement.case.to_string())
            .collect();
        vec![name.to_owned(), format!("{met} of {}", agreements.len()), missed.join("; ")]
    });
    format!("## Summary\n\n{}", table(&["target", "cases that meet it", "cases that miss it"], rows))
}

fn cases(agreements: &[Agreement]) -> String {
    let row = |agreement: &Agreement| {
        let Pairs { offered, in_time, p99_ms, repartitions, refused } = &agreement.all;
        let [goodput_met, p99_met, moves_met] = agreement.all.met().map(|met| verdict(met).to_owned());
        vec![
            agreement.case.load.to_owned(),
            agreement.case.policy.to_owned(),
            agreement.case.handover.to_owned(),
            offered.to_string(),
            spread(in_time.real, 0),
            spread(in_time.simulated, 0),
            ratio(in_time),
            goodput_met,
            spread(p99_ms.real, 1),
            spread(p99_ms.simulated, 1),
            ratio(p99_ms),
            p99_met,
            spread(repartitions.real, 0),
            spread(repartitions.simulated, 0),
            moves_met,
            spread(refused.real, 0),
            spread(refused.simulated, 0),
        ]
    };
    let heads = [
        "load",
        "policy",
        "shares",
        "offered",
        "in time",
        "simulated",
        "ratio",
        "",
        "p99 ms",
        "simulated",
        "ratio",
        "",
        "repartitions",
        "simulated",
        "",
        "refused",
        "simulated",
    ];
    format!("## Cases\n\n{}", table(&heads, agreements.iter().map(row)))
}

fn models(agreements: &[Agreement]) -> String {
    let rows = agreements.iter().flat_map(|agreement| {
        agreement.per_model.iter().map(|(name, pairs)| {
            vec![
                agreement.case.to_string(),
                name.clone(),
                pairs.offered.to_string(),
                spread(pairs.in_time.real, 0),
                spread(pairs.in_time.simulated, 0),
                spread(pairs.p99_ms.real, 1),
                spread(pairs.p99_ms.simulated, 1),
                ratio(&pairs.p99_ms),
                spread(pairs.repartitions.real, 0),
                spread(pairs.repartitions.simulated, 0),
            ]
        })
    });
    let heads = [
        "case",
        "model",
        "offered",
        "in time",
        "simulated",
        "p99 ms",
        "simulated",
        "ratio",
        "repartitions",
        "simulated",
    ];
    format!(
        "## Models\n\nThe targets apply to all requests of a case. The p99 of one model depends on a few requests.\n\n{}",
        table(&heads, rows)
    )
}

fn rounds(agreements: &[Agreement]) -> String {
    let row = |agreement: &Agreement| {
        let over = |figure: fn(&ReplayResult) -> f64| Spread::of(agreement.rounds.iter().map(figure));
        vec![
            agreement.case.to_string(),
            format!("{} of {}", agreement.quiet, agreement.rounds.len()),
            spread(over(|round| round.others_percent), 0),
            spread(over(|round| round.sent_late_ms), 1),
            spread(over(|round| round.load_average), 1),
        ]
    };
    let heads = ["case", "quiet", "others %", "send delay ms (p99)", "load average before"];
    format!(
        "## Load on the machine\n\nThe figures cover all rounds.\n\n{}",
        table(&heads, agreements.iter().map(row))
    )
}

fn ratio(pair: &Pair) -> String {
    number(pair.ratio(), 3)
}
