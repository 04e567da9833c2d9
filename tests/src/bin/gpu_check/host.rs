//! The host of the measurement: device, driver, MPS, and the parts that the host lacks.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::tools::{CheckSettings, CheckedDevice, output};

/// How long each of these programs may take.
const WITHIN: Duration = Duration::from_secs(20);

pub(crate) async fn run(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let log = setting.log("host");
    let ask = async |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments);
        output(command, WITHIN, &log).await
    };
    figures.set(&["date"], ask("date", &["+%F"]).await?.trim());
    figures.set(&["host", "system"], ask("uname", &["-srm"]).await?.trim());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    figures.set(&["host", "cores"], cores);
    match &setting.device {
        CheckedDevice::Emulated => figures.set(&["device"], "emulated"),
        CheckedDevice::Gpu(index) => {
            let query = "--query-gpu=name,driver_version,uuid,memory.total,compute_cap";
            let said = ask("nvidia-smi", &["-i", index, query, "--format=csv,noheader,nounits"]).await?;
            let fields: Vec<&str> = said.trim().split(", ").collect();
            let &[name, driver, uuid, memory, capability] = fields.as_slice() else {
                return Err(StageError::Unusable(format!("nvidia-smi said {said:?}")));
            };
            figures.set(&["device"], name);
            figures.set(&["driver"], driver);
            figures.set(
                &["gpu"],
                json!({ "uuid": uuid, "memory_mib": memory.parse::<u64>().ok(), "capability": capability }),
            );
        }
    }
    // Tells whether there is MPS; supervisors of hosts without it divide nothing.
    let mps = ask("nvidia-cuda-mps-control", &["-v"]).await.ok();
    figures.set(&["mps"], mps.map_or(Value::Null, |said| said.trim().into()));
    figures
        .set(&["doctor"], doctor(setting).await.unwrap_or_else(|error| json!({ "failed": chain(&error) })));
    Ok(())
}

/// The whole report of `shadowslice doctor`, whatever its exit status.
async fn doctor(setting: &CheckSettings) -> Result<Value, StageError> {
    let mut command = Command::new(setting.supervisor());
    command.args(["doctor", "--json"]).kill_on_drop(true);
    let ended = tokio::time::timeout(WITHIN, command.output()).await;
    let program = || "shadowslice doctor --json".to_owned();
    let ended = ended.map_err(|_| StageError::Endless { program: program(), within: WITHIN })?;
    let output = ended.map_err(|source| StageError::Io { what: format!("run `{}`", program()), source })?;
    // Where the binaries lie is the host's business.
    let said =
        String::from_utf8_lossy(&output.stdout).replace(&*setting.bin_dir.to_string_lossy(), "BIN_DIR");
    serde_json::from_str(&said).map_err(|source| {
        let said = String::from_utf8_lossy(&output.stderr);
        let first = said.lines().next().unwrap_or_default();
        StageError::Json { what: format!("what `{}` printed (it said {first:?})", program()), source }
    })
}
