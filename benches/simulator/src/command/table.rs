//! The results of runs as a table for the terminal.

use shadowslice_simulator::results::{ModelRun, SimulationRun};

/// Returns a table with one line per run. If there is only one run, also returns a table of the
/// run's models.
pub(super) fn of(runs: &[SimulationRun]) -> String {
    let heads = ["LOAD", "SEED", "POLICY", "OFFERED/S", "GOODPUT/S", "MET", "P99 MS", "REPARTITIONS"];
    let mut text = aligned(heads, runs.iter().map(row));
    if let [run] = runs {
        let heads = [
            "MODEL",
            "PRIORITY",
            "OFFERED/S",
            "GOODPUT/S",
            "MET",
            "P99 MS",
            "SLO MS",
            "REFUSED",
            "REPARTITIONS",
            "SMS AT END",
        ];
        text.push('\n');
        text.push_str(&aligned(heads, run.per_model.iter().map(model_row)));
    }
    text
}

fn row(run: &SimulationRun) -> [String; 8] {
    [
        run.load.clone(),
        run.seed.to_string(),
        run.policy.clone(),
        format!("{:.1}", run.offered_rps),
        format!("{:.1}", run.goodput_rps),
        format!("{:.2}%", run.attainment * 100.0),
        format!("{:.1}", run.p99_ms),
        run.repartitions.to_string(),
    ]
}

fn model_row((name, model): (&String, &ModelRun)) -> [String; 10] {
    [
        name.clone(),
        model.priority.to_string(),
        format!("{:.1}", model.offered_rps),
        format!("{:.1}", model.goodput_rps),
        format!("{:.2}%", model.attainment * 100.0),
        format!("{:.1}", model.p99_ms),
        format!("{:.1}", model.slo_ms),
        model.refused.to_string(),
        model.repartitions.to_string(),
        model.sms.to_string(),
    ]
}

fn aligned<const COLUMNS: usize>(
    heads: [&str; COLUMNS],
    rows: impl Iterator<Item = [String; COLUMNS]>,
) -> String {
    let rows: Vec<[String; COLUMNS]> = [heads.map(str::to_owned)].into_iter().chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..COLUMNS).map(width).collect();
    let line = |row: &[String; COLUMNS]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}
