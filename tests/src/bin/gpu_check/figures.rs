//! The figures: a tree of JSON that outlives a run, so that the next run goes on where the last one
//! ended.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::StageError;
use crate::report;
use crate::stages::CheckStage;
use crate::tools::{CheckSettings, CheckedDevice};

/// The figures taken so far.
#[derive(Debug)]
pub(crate) struct FigureStore {
    folder: PathBuf,
    /// Tells the binaries under test from other builds.
    binaries: String,
    tree: Value,
}

impl FigureStore {
    /// The figures in a folder; empty if there are none yet.
    pub(crate) fn open(folder: &Path, setting: &CheckSettings) -> Result<Self, StageError> {
        let path = folder.join("gpu.json");
        let tree = match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|source| StageError::Json { what: path.display().to_string(), source })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => json!({}),
            Err(error) => return Err(StageError::io("read", &path)(error)),
        };
        let binaries = fingerprint(&[setting.supervisor(), setting.worker()])?;
        let mut figures = Self { folder: folder.into(), binaries, tree };
        let rehearsal = setting.device == CheckedDevice::Emulated;
        let before = figures.get(&["rehearsal"]).is_some();
        if before != rehearsal && figures.get(&["stages"]).is_some() {
            let why =
                format!("{} holds figures of another kind of device; give another folder", path.display());
            return Err(StageError::Unusable(why));
        }
        if rehearsal {
            figures.set(&["rehearsal"], "on an emulated device: no figure here is a measurement");
        }
        Ok(figures)
    }

    /// The value at a path.
    pub(crate) fn get(&self, path: &[&str]) -> Option<&Value> {
        path.iter().try_fold(&self.tree, |tree, key| tree.get(key)).filter(|value| !value.is_null())
    }

    /// Puts a value at a path, making the way to it.
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

    /// Removes the value at a path.
    pub(crate) fn remove(&mut self, path: &[&str]) {
        if let Some((last, way)) = path.split_last()
            && let Some(tree) = way.iter().try_fold(&mut self.tree, |tree, key| tree.get_mut(key))
            && let Some(map) = tree.as_object_mut()
        {
            map.remove(*last);
        }
    }

    /// Whether a stage has all its figures, taken with these binaries and no quicker than wanted.
    pub(crate) fn has(&self, stage: CheckStage, quick: bool) -> bool {
        let stages = ["stages", stage.name()];
        let at = |key| self.get(&[stages[0], stages[1], key]);
        at("binaries").and_then(Value::as_str) == Some(&self.binaries)
            && at("complete").and_then(Value::as_bool) == Some(true)
            && (quick || at("quick").and_then(Value::as_bool) == Some(false))
    }

    /// Whether an unfinished stage has a model's figures, taken with these binaries, and not by a
    /// quick run if a full run is wanted.
    pub(crate) fn has_model(&self, stage: CheckStage, model: &str, quick: bool) -> bool {
        let taken = self.get(&["progress", stage.name(), model]);
        let quickly = taken.and_then(|taken| taken["quick"].as_bool());
        taken.and_then(|taken| taken["binaries"].as_str()) == Some(&self.binaries)
            && (quick || quickly == Some(false))
    }

    /// Notes that a stage has a model's figures, and writes them.
    pub(crate) fn has_now(&mut self, stage: CheckStage, model: &str, quick: bool) -> Result<(), StageError> {
        let taken = json!({ "binaries": self.binaries, "quick": quick });
        self.set(&["progress", stage.name(), model], taken);
        self.save()
    }

    /// Forgets how far a stage has come.
    pub(crate) fn start_over(&mut self, stage: CheckStage) {
        self.remove(&["progress", stage.name()]);
    }

    /// Notes that a stage ran.
    pub(crate) fn ran(
        &mut self,
        stage: CheckStage,
        setting: &CheckSettings,
        seconds: u64,
        failed: Option<String>,
    ) {
        let record = json!({
            "binaries": self.binaries,
            "complete": failed.is_none(),
            "quick": setting.quick,
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
        let text = serde_json::to_string_pretty(&self.tree).expect("a tree of JSON is written as JSON");
        for (name, text) in [("gpu.json", text + "\n"), ("gpu.md", report::page(&self.tree))] {
            let (part, path) = (self.folder.join(format!("{name}.part")), self.folder.join(name));
            fs::write(&part, text).map_err(StageError::io("write", &part))?;
            fs::rename(&part, &path).map_err(StageError::io("write", &path))?;
        }
        Ok(())
    }
}

/// A number for the contents of files (FNV-1a), and their sizes.
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
    fn paths_are_made_read_and_removed() {
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
        assert!(
            !figures.has_model(CheckStage::Sweep, "resnet50", false),
            "a quick figure is none of a full run"
        );
        figures.start_over(CheckStage::Sweep);
        assert!(!figures.has_model(CheckStage::Sweep, "resnet50", true));
        figures.set(&["stages", "sms", "binaries"], "older");
        assert!(!figures.has(CheckStage::Sms, true));
    }
}
