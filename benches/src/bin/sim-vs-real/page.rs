//! The agreement as a page.

use shadowslice_benches::machine::HostInfo;
use shadowslice_benches::spread::Spread;
use shadowslice_benches::table;

use crate::Options;
use crate::agreement::{Agreement, GOODPUT, P99, Pair, Pairs, REPARTITIONS};
use crate::arrivals::{LEAD, PHASES_MS};

/// The whole page.
pub(crate) fn of(agreements: &[Agreement], options: &Options, machine: &HostInfo) -> String {
    let HostInfo { cpu, cores, kernel, date, commit, .. } = machine;
    let Options { seconds, rounds, utilisation, seed, config, .. } = options;
    let (config, lead) = (config.display(), LEAD.as_secs_f64());
    let (phases, last_phase) = (PHASES_MS.len(), PHASES_MS.iter().max().unwrap_or(&0));
    format!(
        "# The simulator beside the real thing

What `shadowslice-simulate` predicts, and what `shadowslice serve` does: the same configuration (`{config}`, a mix on which nothing was
tuned or calibrated), the emulated device, and the very same arrivals, sent over gRPC and a Unix socket whether or not earlier ones
were answered. Shares change by a shadow or in-process. `make sim-vs-real` writes this page, as `make bench` does; nothing here is written by hand.

{cpu}, {cores} cores that hold supervisor, workers and client, Linux {kernel}, no GPU. {date}, commit {commit}.

Each load is drawn once (seed {seed}, utilisation {utilisation}, {seconds} s, after {lead} s of nothing in which the supervisor starts and its policy is asked
already), simulated with `--no-interference`, and sent to {rounds} fresh supervisors, the cases in turns. Goodput counts requests answered within their SLO;
latency counts from the scheduled arrival to the last byte.

* **real**: the median over the rounds in which others took at most 10 % of the machine, or over all where there were none (see *quiet*), with the smallest
  and the largest in brackets.
* **simulated**: the median and the range over {phases} phases. Where a policy's intervals fall between requests can be said of the supervisor to some {last_phase} ms only, so
  each load is simulated as if it came 0 to {last_phase} ms earlier.

The aims, of the medians: goodput within {:.0} %, p99 of all answers within {:.0} %, repartitions within {REPARTITIONS:.0}.

{}",
        GOODPUT * 100.0,
        P99 * 100.0,
        tables(agreements)
    )
}

/// All figures.
pub(crate) fn tables(agreements: &[Agreement]) -> String {
    [summary(agreements), cases(agreements), models(agreements), rounds(agreements)].join("\n")
}

fn summary(agreements: &[Agreement]) -> String {
    let names = ["goodput", "p99", "repartitions"];
    let rows = names.into_iter().enumerate().map(|(aim, name)| {
        let met = agreements.iter().filter(|agreement| agreement.all.met()[aim]).count();
        let missed: Vec<String> = agreements
            .iter()
            .filter(|agreement| !agreement.all.met()[aim])
            .map(|agreement| agreement.case.to_string())
            .collect();
        vec![name.to_owned(), format!("{met} of {}", agreements.len()), missed.join("; ")]
    });
    format!("## In short\n\n{}", table(&["aim", "cases that meet it", "those that do not"], rows))
}

fn cases(agreements: &[Agreement]) -> String {
    let row = |agreement: &Agreement| {
        let Pairs { offered, in_time, p99_ms, repartitions, refused } = &agreement.all;
        let [goodput_met, p99_met, moves_met] = agreement.all.met().map(verdict);
        vec![
            agreement.case.load.to_owned(),
            agreement.case.policy.to_owned(),
            agreement.case.handover.to_owned(),
            offered.to_string(),
            whole(in_time.real),
            whole(in_time.simulated),
            ratio(in_time),
            goodput_met,
            tenths(p99_ms.real),
            tenths(p99_ms.simulated),
            ratio(p99_ms),
            p99_met,
            whole(repartitions.real),
            whole(repartitions.simulated),
            moves_met,
            whole(refused.real),
            whole(refused.simulated),
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
                whole(pairs.in_time.real),
                whole(pairs.in_time.simulated),
                tenths(pairs.p99_ms.real),
                tenths(pairs.p99_ms.simulated),
                ratio(&pairs.p99_ms),
                whole(pairs.repartitions.real),
                whole(pairs.repartitions.simulated),
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
        "## Models\n\nThe aims are about all requests of a case. A model has fewer, and its p99 rests on a handful of them.\n\n{}",
        table(&heads, rows)
    )
}

fn rounds(agreements: &[Agreement]) -> String {
    let row = |agreement: &Agreement| {
        let spread =
            |figure: fn(&crate::real::ReplayResult) -> f64| Spread::of(agreement.rounds.iter().map(figure));
        vec![
            agreement.case.to_string(),
            format!("{} of {}", agreement.quiet, agreement.rounds.len()),
            whole(spread(|round| round.others_percent)),
            tenths(spread(|round| round.sent_late_ms)),
            tenths(spread(|round| round.load_average)),
        ]
    };
    let heads = ["case", "quiet", "others %", "sent late ms (p99)", "load average before"];
    format!("## The machine\n\nOver all rounds.\n\n{}", table(&heads, agreements.iter().map(row)))
}

fn ratio(pair: &Pair) -> String {
    format!("{:.3}", pair.ratio())
}

fn verdict(met: bool) -> String {
    if met { "met" } else { "**not met**" }.to_owned()
}

fn whole(Spread { median, min, max }: Spread) -> String {
    if min == max { format!("{median:.0}") } else { format!("{median:.0} ({min:.0} .. {max:.0})") }
}

fn tenths(Spread { median, min, max }: Spread) -> String {
    if min == max { format!("{median:.1}") } else { format!("{median:.1} ({min:.1} .. {max:.1})") }
}
