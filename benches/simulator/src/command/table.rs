//! The results of runs as a table for the terminal.

use shadowslice_simulator::results::{ModelRun, SimulationRun, SleepRun};

/// Returns a table with one line per run. If there is only one run, also returns a table of the
/// run's models. If models may sleep, both tables show the wakes.
pub(super) fn of(runs: &[SimulationRun]) -> String {
    let mut heads = vec!["LOAD", "SEED", "POLICY", "OFFERED/S", "GOODPUT/S", "MET", "P99 MS", "REPARTITIONS"];
    let sleeps = runs.iter().any(|run| run.per_model.values().any(|model| model.sleep.is_some()));
    if sleeps {
        heads.push("WAKES");
    }
    let mut text = aligned(&heads, runs.iter().map(|run| row(run, sleeps)));
    if let [run] = runs {
        let mut heads = vec![
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
        if sleeps {
            heads.extend(["WAKES", "WAKING"]);
        }
        text.push('\n');
        text.push_str(&aligned(&heads, run.per_model.iter().map(|model| model_row(model, sleeps))));
    }
    text
}

fn row(run: &SimulationRun, sleeps: bool) -> Vec<String> {
    let mut cells = vec![
        run.load.clone(),
        run.seed.to_string(),
        run.policy.clone(),
        format!("{:.1}", run.offered_rps),
        format!("{:.1}", run.goodput_rps),
        format!("{:.2}%", run.attainment * 100.0),
        format!("{:.1}", run.p99_ms),
        run.repartitions.to_string(),
    ];
    if sleeps {
        let wakes = run.per_model.values().filter_map(|model| model.sleep).map(|sleep| sleep.wakes);
        cells.push(wakes.sum::<u64>().to_string());
    }
    cells
}

fn model_row((name, model): (&String, &ModelRun), sleeps: bool) -> Vec<String> {
    let mut cells = vec![
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
    ];
    if sleeps {
        let shown = |sleep: SleepRun| [sleep.wakes.to_string(), format!("{:.2}%", sleep.waking * 100.0)];
        cells.extend(model.sleep.map_or(["-", "-"].map(str::to_owned), shown));
    }
    cells
}

fn aligned(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let heads = heads.iter().map(|&head| head.to_owned()).collect();
    let rows: Vec<Vec<String>> = [heads].into_iter().chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}
