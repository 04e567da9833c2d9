//! More models than fit into the GPU's memory. In shadowslice, models sleep and wake. In Triton, the client
//! loads and unloads models, as Triton's explicit model control requires.

mod client;
mod page;
mod plan;
mod results;
mod servers;
mod slots;

use std::time::Duration;

use crate::MeasureError;

use super::VsTritonOptions;
use client::{ManyModelsClient, ModelControl};
use plan::planned_requests;
use results::LoadFigures;
use servers::{AWAKE, LOADED, LoadedModels, SESSION_TIME, SleepingModels, TritonBackend, copy_time};

pub(crate) use page::section;
pub(crate) use results::ManyModelsResult;

/// The name of the comparison, for `--only`.
pub(crate) const NAME: &str = "more models than fit";

/// The loads, in requests per second. Triton's Python backend keeps up with the first one only.
const RATES: [f64; 2] = [1.0, 20.0];

/// Measures all servers, one after the other, with the same requests.
pub(crate) async fn measure(options: &VsTritonOptions) -> Result<Vec<ManyModelsResult>, MeasureError> {
    let span = options.many_seconds;
    let mut results = sleeping(options, span).await?;
    let backends = [
        TritonBackend::Minimal(copy_time()),
        TritonBackend::Minimal(copy_time() + SESSION_TIME),
        TritonBackend::Python,
    ];
    for backend in backends {
        results.extend(loading(options, backend, span).await?);
    }
    Ok(results)
}

/// Measures shadowslice.
async fn sleeping(options: &VsTritonOptions, span: Duration) -> Result<Vec<ManyModelsResult>, MeasureError> {
    let ours = SleepingModels::start(options).await?;
    let client = ManyModelsClient::new(ours.http, ModelControl::Server, AWAKE);
    client.warm_up(AWAKE).await?;
    let mut results = Vec::new();
    for rate in RATES {
        let before = ours.wakes().await?;
        let figures = client.send(&planned_requests(rate, span)).await?;
        let wakes = ours.wakes().await?.since(before);
        results.push(announced(figures, "shadowslice".to_owned(), rate, Some(wakes)));
    }
    ours.stop().await?;
    Ok(results)
}

/// Measures Triton with one backend.
async fn loading(
    options: &VsTritonOptions,
    backend: TritonBackend,
    span: Duration,
) -> Result<Vec<ManyModelsResult>, MeasureError> {
    let triton = LoadedModels::start(options, backend).await?;
    let client = ManyModelsClient::new(triton.server.http, ModelControl::Client, LOADED);
    client.warm_up(LOADED).await?;
    let mut results = Vec::new();
    for rate in RATES {
        let figures = client.send(&planned_requests(rate, span)).await?;
        results.push(announced(figures, backend.to_string(), rate, None));
    }
    triton.stop().await;
    Ok(results)
}

/// Returns the result of a load, and prints it.
fn announced(
    figures: LoadFigures,
    server: String,
    per_second: f64,
    wakes: Option<results::WakeCounts>,
) -> ManyModelsResult {
    let result = figures.result(server, per_second, wakes);
    eprintln!("{NAME}: {result}");
    result
}
