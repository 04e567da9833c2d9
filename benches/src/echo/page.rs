//! The figures of the echo benchmark, as a table and as JSON.

use std::fmt;

use serde::Serialize;

use crate::closed_loop::RoundResult;
use crate::machine::HostInfo;
use crate::plan::{EchoSetting, ServerKind};
use crate::report::{number, spread};
use crate::spread::{Spread, counted};

use super::EchoOptions;

/// The figures of all settings.
#[derive(Debug, Serialize)]
pub(crate) struct EchoReport {
    machine: HostInfo,
    seconds_per_round: f64,
    settings: Vec<SettingRow>,
}

/// The figures of one setting.
#[derive(Debug, Serialize)]
struct SettingRow {
    #[serde(flatten)]
    setting: EchoSetting,
    requests_per_second: Spread,
    p50_us: Spread,
    p99_us: Spread,
    supervisor_cpu_us: Spread,
    worker_cpu_us: Spread,
    server_cpu_us: Spread,
    /// The median CPU time per request of this server divided by that of the bare server, or `None`
    /// without a baseline.
    times_bare: Option<f64>,
    client_cpu_us: Spread,
    others_percent: Spread,
    /// The number of rounds that other programs did not disturb. If this number is not zero, the
    /// figures above come only from these rounds.
    quiet: usize,
    rounds: Vec<RoundResult>,
}

impl SettingRow {
    fn new(setting: EchoSetting, rounds: Vec<RoundResult>, bare: Option<&[RoundResult]>) -> Self {
        let counted = counted(&rounds);
        let over = |figure: fn(&RoundResult) -> f64| Spread::of(counted.iter().map(figure));
        let server_cpu_us = over(RoundResult::server_cpu_us);
        let bare_cpu_us = bare.map(|bare| {
            Spread::of(crate::spread::counted(bare).iter().map(RoundResult::server_cpu_us)).median
        });
        Self {
            setting,
            requests_per_second: over(|round| round.requests_per_second),
            p50_us: over(|round| round.p50_us),
            p99_us: over(|round| round.p99_us),
            supervisor_cpu_us: over(|round| round.supervisor_cpu_us),
            worker_cpu_us: over(|round| round.worker_cpu_us),
            server_cpu_us,
            times_bare: bare_cpu_us.map(|bare| server_cpu_us.median / bare),
            client_cpu_us: over(|round| round.client_cpu_us),
            others_percent: over(|round| round.others_percent),
            quiet: rounds.iter().filter(|round| round.is_quiet()).count(),
            rounds,
        }
    }
}

impl EchoReport {
    /// Returns the report on the rounds of all settings. `rounds` is in the order of `settings`,
    /// and contains at least one round for each setting.
    pub(crate) fn new(
        machine: HostInfo,
        options: &EchoOptions,
        settings: Vec<EchoSetting>,
        rounds: Vec<Vec<RoundResult>>,
    ) -> Self {
        let row = |(index, &setting): (usize, &EchoSetting)| {
            let bare = settings.iter().position(|other| *other == setting.bare());
            let bare = bare.filter(|_| setting.server == ServerKind::Shadowslice);
            SettingRow::new(setting, rounds[index].clone(), bare.map(|bare| &rounds[bare][..]))
        };
        let rows = settings.iter().enumerate().map(row).collect();
        Self { machine, seconds_per_round: options.seconds.as_secs_f64(), settings: rows }
    }
}

const COLUMNS: [&str; 10] = [
    "setting",
    "requests/s",
    "p50 us",
    "p99 us",
    "server CPU us",
    "supervisor + worker",
    "x bare",
    "client CPU us",
    "others %",
    "quiet",
];

fn cells(row: &SettingRow) -> [String; COLUMNS.len()] {
    let parts = match row.setting.server {
        ServerKind::Shadowslice => {
            format!("{:.1} + {:.1}", row.supervisor_cpu_us.median, row.worker_cpu_us.median)
        }
        ServerKind::Bare => "-".into(),
    };
    [
        row.setting.to_string(),
        spread(row.requests_per_second, 0),
        spread(row.p50_us, 0),
        spread(row.p99_us, 0),
        spread(row.server_cpu_us, 1),
        parts,
        row.times_bare.map_or("-".into(), |ratio| number(ratio, 2)),
        number(row.client_cpu_us.median, 1),
        number(row.others_percent.median, 0),
        format!("{} of {}", row.quiet, row.rounds.len()),
    ]
}

impl fmt::Display for EchoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostInfo { cpu, cores, kernel, date, commit, .. } = &self.machine;
        writeln!(
            f,
            "echo requests through the whole system, closed loop, every byte of the answers checked"
        )?;
        writeln!(f, "{cpu}, {cores} cores, Linux {kernel}, {date}, commit {commit}")?;
        writeln!(
            f,
            "rounds of {} s; median (min .. max) of the quiet rounds, or of all rounds if none was quiet; \
             set SHADOWSLICE_BENCH_ROUNDS, _SECONDS, _PATIENCE, _CONNECTIONS, _ONLY or _JSON to change it",
            self.seconds_per_round
        )?;
        let mut lines = vec![COLUMNS.map(String::from)];
        lines.push(std::array::from_fn(|_| "---".into()));
        lines.extend(self.settings.iter().map(cells));
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let widths: [usize; COLUMNS.len()] = std::array::from_fn(width);
        for line in &lines {
            let padded = line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
            writeln!(f, "| {} |", padded.collect::<Vec<_>>().join(" | "))?;
        }
        Ok(())
    }
}
