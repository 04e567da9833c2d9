//! Reads profile files.

use std::path::Path;

use shadowslice_shared::profile::{
    Execution, ExecutionRow, ProcessMemory, Profile, ProfileSource, StartTimes, TableError,
};
use shadowslice_shared::units::Sms;

use super::engine::shape;
use super::faults::{ConfigError, FaultLog};
use super::keys::PROFILE;
use super::reader::{Fields, Value};
use super::yaml::YamlNode;
use super::{Context, usable, yaml};

const EXAMPLE: &str = "{source: {kind: illustrative}, execution_ms: {sms: [132], 1: [3.0]}}";

/// Reads the profile of a model. Records the profile's faults as faults of the model's files.
pub(super) fn load(value: &Value<'_>, path: &Path, context: &Context<'_>) -> Option<Profile> {
    match read(path) {
        Ok(profile) => Some(profile),
        Err(ConfigError::Read { source, .. }) => {
            let message = format!(
                "cannot use {}: {source}; put the profile there, correct the path or remove the key",
                path.display()
            );
            context.file_fault(value, message);
            None
        }
        Err(ConfigError::Faults(faults)) => {
            context.file_faults.borrow_mut().extend(faults);
            None
        }
    }
}

/// Reads a profile.
///
/// # Errors
///
/// [`ConfigError`] if the file cannot be read or has faults.
pub fn read(path: &Path) -> Result<Profile, ConfigError> {
    let log = FaultLog::new(path);
    let text = usable(path).and_then(|()| yaml::read(path, &log));
    let text = text.map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let tree = text.and_then(|text| yaml::parse(&text, EXAMPLE, &log));
    let tree = tree.filter(|tree| is_profile(tree, &log));
    let may_be_shown = tree.is_some();
    let profile = tree.and_then(|tree| profile(&Value::root(&tree, &PROFILE, &log)));
    let mut faults = log.into_sorted();
    if !may_be_shown {
        faults.iter_mut().for_each(|fault| fault.path.clear());
    }
    match profile {
        Some(profile) if faults.is_empty() => Ok(profile),
        _ => Err(ConfigError::Faults(faults)),
    }
}

/// Returns whether the document is a profile. If it is not, records a fault. The fault does not
/// quote the document, because the document may contain a secret.
fn is_profile(root: &YamlNode, log: &FaultLog) -> bool {
    let found = ["source", "execution_ms"].iter().any(|key| root.get(key).is_some());
    if !found {
        let message = "this is not a profile (a map with `source` and `execution_ms`); correct the path";
        log.add(root.at, "", message);
    }
    found
}

fn profile(root: &Value<'_>) -> Option<Profile> {
    let fields = root.fields();
    let source = source(&fields);
    let execution = execution(&fields);
    let memory = fields.section("memory");
    let bytes = |key| memory.read(key, |value| value.size());
    let start = fields.section("start");
    let time = |key| start.read(key, |value| value.duration());
    let memory = ProcessMemory {
        context: bytes("context"),
        weights: bytes("weights"),
        activations: bytes("activations"),
    };
    let start = StartTimes { process: time("process"), load: time("load"), warm: time("warm") };
    let bandwidth = fields.read("bandwidth", |value| value.number());
    let kernels = fields.optional("kernels", Value::whole);
    let execution = execution.map(|table| match kernels {
        Some(kernels) => table.with_kernels(kernels),
        None => table,
    });
    let shapes = fields.get("shapes");
    let shapes = shapes.iter().flat_map(Value::any_fields);
    let shapes = shapes.filter_map(|(input, axes)| Some((input.to_owned(), shape(&axes)?))).collect();
    Some(Profile { source: source?, memory, start, bandwidth, shapes, execution: execution? })
}

fn source(profile: &Fields<'_>) -> Option<ProfileSource> {
    let value = profile.required(
        "source",
        "give {kind: illustrative}, or {kind: measured, device: .., driver: .., date: ..}",
    )?;
    let fields = value.fields();
    let kind = fields.required("kind", "give `illustrative` or `measured`")?;
    let details = ["device", "driver", "date"];
    if kind.one_of(&[("illustrative", false), ("measured", true)])? {
        let [device, driver, date] = details.map(|key| {
            let value = fields.required(key, "a measured profile needs `device`, `driver` and `date`")?;
            value.text().map(str::to_owned)
        });
        return Some(ProfileSource::Measured { device: device?, driver: driver?, date: date? });
    }
    fields.forbid(&details, "only a measured profile has this");
    Some(ProfileSource::Illustrative)
}

fn execution(profile: &Fields<'_>) -> Option<Execution> {
    let table =
        profile.required("execution_ms", "give for example `{sms: [14, 66, 132], 1: [9.0, 3.0, 2.9]}`")?;
    let mut sms = Some(Vec::new());
    let mut rows = Vec::new();
    for (key, value) in table.any_fields() {
        if key == "sms" {
            sms = columns(&value);
        } else {
            rows.push(row(key, &value).map(|row| (row, value)));
        }
    }
    let all_read = sms.is_some() && rows.iter().all(Option::is_some) && table.is_map();
    let rows: Vec<_> = rows.into_iter().flatten().collect();
    let list: Vec<_> = rows.iter().map(|(row, _)| row.clone()).collect();
    for bad in Execution::faults(sms.as_deref().unwrap_or_default(), &list) {
        let follows = matches!(bad, TableError::NoColumns | TableError::NoRows) && !all_read;
        if !follows {
            culprit(&bad, &table, &rows).fault(bad.to_string());
        }
    }
    Execution::new(sms?, list).ok().filter(|_| all_read)
}

fn culprit<'a>(bad: &TableError, table: &Value<'a>, rows: &[(ExecutionRow, Value<'a>)]) -> Value<'a> {
    let of_batch =
        |batch: u32| rows.iter().find(|(row, _)| row.batch == batch).map(|(_, value)| value.clone());
    let value = match bad {
        TableError::Ragged { batch, .. } | TableError::NotATime { batch, .. } => of_batch(*batch),
        TableError::ColumnsOutOfOrder => {
            table.any_fields().find(|(key, _)| *key == "sms").map(|(_, value)| value)
        }
        TableError::NoColumns | TableError::NoRows | TableError::RowsOutOfOrder => None,
    };
    value.unwrap_or_else(|| table.clone())
}

fn columns(value: &Value<'_>) -> Option<Vec<Sms>> {
    value.items().iter().map(|item| item.whole().map(Sms)).collect()
}

fn row(key: &str, value: &Value<'_>) -> Option<ExecutionRow> {
    let Some(batch) = key.parse().ok().filter(|batch| (1..=65_536).contains(batch)) else {
        value.fault("invalid batch size; use the key `sms` or a batch size from 1 to 65536");
        return None;
    };
    let ms = value.items().iter().map(Value::number).collect::<Option<_>>()?;
    Some(ExecutionRow { batch, ms })
}
