//! The host of the measurement: device, driver, MPS, and the report of `shadowslice doctor`.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::tools::{CheckSettings, CheckedDevice, output};

/// The time limit of each external program.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let log = settings.log("host");
    let ask = async |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments);
        output(command, PROGRAM_TIMEOUT, &log).await
    };
    figures.set(&["date"], ask("date", &["+%F"]).await?.trim());
    figures.set(&["host", "system"], ask("uname", &["-srm"]).await?.trim());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    figures.set(&["host", "cores"], cores);
    match &settings.device {
        CheckedDevice::Emulated => figures.set(&["device"], "emulated"),
        CheckedDevice::Gpu(index) => {
            let query = "--query-gpu=name,driver_version,uuid,memory.total,compute_cap";
            let output = ask("nvidia-smi", &["-i", index, query, "--format=csv,noheader,nounits"]).await?;
            let fields: Vec<&str> = output.trim().split(", ").collect();
            let &[name, driver, uuid, memory, capability] = fields.as_slice() else {
                return Err(StageError::Unusable(format!("unexpected output of nvidia-smi: {output:?}")));
            };
            figures.set(&["device"], name);
            figures.set(&["driver"], driver);
            figures.set(
                &["gpu"],
                json!({ "uuid": uuid, "memory_mib": memory.parse::<u64>().ok(), "capability": capability }),
            );
        }
    }
    // The program is missing on a host without MPS, so a failure is recorded as null.
    let mps = ask("nvidia-cuda-mps-control", &["-v"]).await.ok();
    figures.set(&["mps"], mps.map_or(Value::Null, |version| version.trim().into()));
    figures
        .set(&["doctor"], doctor(settings).await.unwrap_or_else(|error| json!({ "failed": chain(&error) })));
    Ok(())
}

/// Returns the complete report of `shadowslice doctor`, regardless of its exit status.
async fn doctor(settings: &CheckSettings) -> Result<Value, StageError> {
    let mut command = Command::new(settings.supervisor());
    command.args(["doctor", "--json"]).kill_on_drop(true);
    let result = tokio::time::timeout(PROGRAM_TIMEOUT, command.output()).await;
    let program = || "shadowslice doctor --json".to_owned();
    let result = result.map_err(|_| StageError::Timeout { program: program(), within: PROGRAM_TIMEOUT })?;
    let output = result.map_err(|source| StageError::Io { what: format!("run `{}`", program()), source })?;
    // The folder of the binaries differs between hosts, so the figures contain a placeholder.
    let report =
        String::from_utf8_lossy(&output.stdout).replace(&*settings.bin_dir.to_string_lossy(), "BIN_DIR");
    serde_json::from_str(&report).map_err(|source| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first = stderr.lines().next().unwrap_or_default();
        StageError::Json { what: format!("the output of `{}` (stderr: {first:?})", program()), source }
    })
}
