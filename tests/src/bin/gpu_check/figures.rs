//! The figures of the check. They are a JSON tree, which is saved after each step so that the next
//! run continues where the last run stopped.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::StageError;
use crate::report;
use crate::stages::CheckStage;
use crate::tools::{CheckSettings, CheckedDevice};

/// The figures that have been measured so far.
#[derive(Debug)]
pub(crate) struct FigureStore {
    folder: PathBuf,
    /// A fingerprint of the binaries under test.
    binaries: String,
    tree: Value,
}

impl FigureStore {
    /// Opens the figures in a folder. Starts without figures if the folder contains none.
    pub(crate) fn open(folder: &Path, settings: &CheckSettings) -> Result<Self, StageError> {
        let path = folder.join("gpu.json");
        let tree = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|source| StageError::Json { what: path.display().to_string(), source })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => json!({}),
            Err(error) => return Err(StageError::io("read", &path)(error)),
        };
        let binaries = fingerprint(&[settings.supervisor(), settings.worker()])?;
        let mut figures = Self { folder: folder.into(), binaries, tree };
        let rehearsal = settings.device == CheckedDevice::Emulated;
        let before = figures.get(&["rehearsal"]).is_some();
        if before != rehearsal && figures.get(&["stages"]).is_some() {
            let why = format!("{} has figures of another kind of device; use another folder", path.display());
            return Err(StageError::Unusable(why));
        }
        if rehearsal {
            figures.set(&["rehearsal"], "on an emulated device: no figure here is a measurement");
        }
        Ok(figures)
    }

    /// Returns the value at a path of keys, or `None` if the value is missing or null.
    pub(crate) fn get(&self, path: &[&str]) -> Option<&Value> {
        path.iter().try_fold(&self.tree, |tree, key| tree.get(key)).filter(|value| !value.is_null())
    }

    /// Sets the value at a path of keys, and creates missing maps along the path.
    pub(crate) fn set(&mut self, path: &[&str], value: impl Into<Value>) {
        let mut tree = &mut self.tree;
        for key in path {
            if !tree.is_object() {
                *tree = Value::Object(Map::new());
            }
            tree = &mut tree[*key];
        }
        *tree = value.into();
    }

    pub(crate) fn remove(&mut self, path: &[&str]) {
        if let Some((last, way)) = path.split_last()
            && let Some(tree) = way.iter().try_fold(&mut self.tree, |tree, key| tree.get_mut(key))
            && let Some(map) = tree.as_object_mut()
        {
            map.remove(*last);
        }
    }

    /// Returns true if all figures of a stage exist and come from the binaries under test. If
    /// `quick` is false, figures from a quick run do not count.
    pub(crate) fn has(&self, stage: CheckStage, quick: bool) -> bool {
        let stages = ["stages", stage.name()];
        let at = |key| self.get(&[stages[0], stages[1], key]);
        at("binaries").and_then(Value::as_str) == Some(&self.binaries)
            && at("complete").and_then(Value::as_bool) == Some(true)
            && (quick || at("quick").and_then(Value::as_bool) == Some(false))
    }

    /// Returns true if an unfinished stage has a model's figures from the binaries under test. If
    /// `quick` is false, figures from a quick run do not count.
    pub(crate) fn has_model(&self, stage: CheckStage, model: &str, quick: bool) -> bool {
        let taken = self.get(&["progress", stage.name(), model]);
        let quickly = taken.and_then(|taken| taken["quick"].as_bool());
        taken.and_then(|taken| taken["binaries"].as_str()) == Some(&self.binaries)
            && (quick || quickly == Some(false))
    }

    /// Records that a stage has finished with a model, and saves all figures.
    pub(crate) fn record_model(
        &mut self,
        stage: CheckStage,
        model: &str,
        quick: bool,
    ) -> Result<(), StageError> {
        let taken = json!({ "binaries": self.binaries, "quick": quick });
        self.set(&["progress", stage.name(), model], taken);
        self.save()
    }

    /// Removes the record of the models that a stage has finished, so that the stage measures all
    /// models again.
    pub(crate) fn start_over(&mut self, stage: CheckStage) {
        self.remove(&["progress", stage.name()]);
    }

    /// Records the result of a stage.
    pub(crate) fn record_stage(
        &mut self,
        stage: CheckStage,
        settings: &CheckSettings,
        seconds: u64,
        failed: Option<String>,
    ) {
        let record = json!({
            "binaries": self.binaries,
            "complete": failed.is_none(),
            "quick": settings.quick,
            "seconds": seconds,
            "date": self.get(&["date"]),
        });
        self.set(&["stages", stage.name()], record);
        match failed {
            Some(why) => self.set(&["failed", stage.name()], why),
            None => {
                self.remove(&["failed", stage.name()]);
                if !stage.accumulates() {
                    self.start_over(stage);
                }
            }
        }
    }

    /// Writes gpu.json and gpu.md.
    pub(crate) fn save(&self) -> Result<(), StageError> {
        let text = serde_json::to_string_pretty(&self.tree).expect("a JSON tree can be serialised");
        for (name, text) in [("gpu.json", text + "\n"), ("gpu.md", report::page(&self.tree))] {
            let (part, path) = (self.folder.join(format!("{name}.part")), self.folder.join(name));
            fs::write(&part, text).map_err(StageError::io("write", &part))?;
            fs::rename(&part, &path).map_err(StageError::io("write", &path))?;
        }
        Ok(())
    }
}

/// Computes a hash (FNV-1a) of the contents of files.
fn fingerprint(paths: &[PathBuf]) -> Result<String, StageError> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for path in paths {
        let mut bytes = Vec::new();
        let mut file = fs::File::open(path).map_err(StageError::io("read", path))?;
        file.read_to_end(&mut bytes).map_err(StageError::io("read", path))?;
        for byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    Ok(format!("{hash:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_set_read_and_removed() {
        let mut figures = FigureStore { folder: PathBuf::new(), binaries: "b".into(), tree: json!({}) };
        figures.set(&["handover_ms", "resnet50", "spawn"], 3.5);
        figures.set(&["handover_ms", "resnet50", "proof"], 1);
        assert_eq!(figures.get(&["handover_ms", "resnet50", "spawn"]), Some(&json!(3.5)));
        figures.remove(&["handover_ms", "resnet50", "spawn"]);
        figures.remove(&["nothing", "there"]);
        assert_eq!(figures.tree, json!({"handover_ms": {"resnet50": {"proof": 1}}}));
        assert!(!figures.has(CheckStage::Sms, true));
        figures.set(&["stages", "sms"], json!({"binaries": "b", "complete": true, "quick": true}));
        assert!(figures.has(CheckStage::Sms, true) && !figures.has(CheckStage::Sms, false));
        figures.set(&["progress", "sweep", "resnet50"], json!({"binaries": "b", "quick": true}));
        assert!(figures.has_model(CheckStage::Sweep, "resnet50", true));
        assert!(!figures.has_model(CheckStage::Sweep, "resnet50", false), "a full run needs full figures");
        figures.start_over(CheckStage::Sweep);
        assert!(!figures.has_model(CheckStage::Sweep, "resnet50", true));
        figures.set(&["stages", "sms", "binaries"], "older");
        assert!(!figures.has(CheckStage::Sms, true));
    }
}
