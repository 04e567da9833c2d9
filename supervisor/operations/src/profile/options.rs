//! The options of `shadowslice profile`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shadowslice_config::WarmupConfig;
use shadowslice_shared::tensor::TensorSpec;
use shadowslice_shared::units::Percent;

const LONGEST_NAME: usize = 128;

const OPTIONS: [(&str, &str); 8] = [
    ("models[0].python.executable", "--python"),
    ("models[0].path", "MODEL"),
    ("models[0].profile", "--emulate"),
    ("models[0].batch.max", "--max-batch"),
    ("models[0].warmup", "--shape"),
    ("gpus[0].device", "--device"),
    ("gpus[0].sms", "--sms"),
    ("onnxruntime.library", "--library"),
];

const ADVICE: [(&str, &str); 6] = [
    ("raise limits.response_bytes", "give a smaller --max-batch"),
    ("use a smaller batch.max", "give a smaller --max-batch"),
    ("set batch.max: 0 for this model", "give --max-batch 0"),
    ("set `batch: {max: 0}`", "give --max-batch 0"),
    ("batch.max is", "--max-batch is"),
    ("warmup.", "--shape "),
];

/// The model to measure, and how.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The model's file: ONNX or Python.
    pub(super) model: PathBuf,
    /// The interpreter of a model in Python [default: python3].
    #[arg(long, value_name = "EXECUTABLE")]
    pub(super) python: Option<PathBuf>,
    /// A GPU's index or UUID, or `emulated`.
    #[arg(long)]
    pub(super) device: String,
    /// SMs of the emulated device.
    #[arg(long, allow_negative_numbers = true, default_value = "132")]
    pub(super) sms: u32,
    /// The profile by which the emulated device takes its time.
    #[arg(long, value_name = "PROFILE.yaml")]
    pub(super) emulate: Option<PathBuf>,
    /// Shares to measure at, with or without `%`.
    #[arg(long, value_delimiter = ',', default_value = "6,12,20,30,45,60,80,100")]
    pub(super) shares: Vec<Percent>,
    /// The largest batch; sizes are powers of two up to it. 0 for a model without a batch axis.
    #[arg(long, allow_negative_numbers = true)]
    pub(super) max_batch: Option<u32>,
    /// The shape of an input without its batch axis, where the model leaves it open.
    #[arg(long, value_name = "INPUT=AXISxAXIS", value_parser = shape)]
    pub(super) shape: Vec<(String, Vec<i64>)>,
    /// Batches of each size that are timed, after as many that are not.
    #[arg(
        long,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        default_value = "20"
    )]
    pub(super) runs: u32,
    /// Seconds after which no further batch of a size is run.
    #[arg(long, allow_negative_numbers = true, value_parser = seconds, default_value = "2")]
    pub(super) seconds: Duration,
    /// ONNX Runtime's library [default: as `serve` would choose it].
    #[arg(long)]
    pub(super) library: Option<PathBuf>,
    /// Where to write the profile [default: standard output].
    #[arg(long, short)]
    pub(super) output: Option<PathBuf>,
}

impl Options {
    /// The command line as far as it says what is measured.
    pub(super) fn command(&self) -> String {
        let shapes = self.shape.iter().map(|(input, axes)| {
            let axes: Vec<_> = axes.iter().map(i64::to_string).collect();
            format!(" --shape {input}={}", axes.join("x"))
        });
        let shapes: String = shapes.collect();
        format!("shadowslice profile {} --device {}{shapes}", self.model.display(), self.device)
    }

    /// A Python model is a file of Python, or a folder with one.
    pub(super) fn engine(&self) -> &'static str {
        let in_python = self.model.is_dir() || self.model.extension().is_some_and(|ending| ending == "py");
        if in_python { "python" } else { "onnxruntime" }
    }

    /// The model's name: its file's stem, with other letters replaced.
    pub(super) fn name(&self) -> String {
        let stem = self.model.file_stem().unwrap_or_default().to_string_lossy();
        let fits = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
        let name: String =
            stem.chars().take(LONGEST_NAME).map(|letter| if fits(letter) { letter } else { '_' }).collect();
        if name.is_empty() { "model".to_owned() } else { name }
    }
}

/// A message about the configuration that was made up in that file, in terms of the options.
pub(super) fn instead_of_keys(said: &str, made_up: &Path) -> String {
    let place = format!("{}:", made_up.display());
    let line = |line: &str| {
        // Behind the file come the line and the column.
        let fault = line.strip_prefix(&place).and_then(|rest| rest.split_once(": ")).map(|(_, fault)| fault);
        let Some(fault) = fault else { return line.to_owned() };
        let option = OPTIONS.iter().find_map(|(key, option)| Some((option, fault.strip_prefix(key)?)));
        option.map_or_else(|| fault.to_owned(), |(option, rest)| format!("{option}{rest}"))
    };
    said.lines().map(line).collect::<Vec<_>>().join("\n")
}

pub(super) fn advice(said: &str) -> String {
    ADVICE.iter().fold(said.to_owned(), |said, (key, option)| said.replace(key, option))
}

/// Inputs with free axes besides the batch for which no shape is given, and what to give. How long
/// a batch takes depends on them, so no length is made up.
pub(super) fn free_axes(
    inputs: &[TensorSpec],
    batched: bool,
    given: &WarmupConfig,
    command: &str,
) -> Option<String> {
    let rows = inputs.iter().map(|input| (&input.name, &input.shape[usize::from(batched)..]));
    let has_shape = |name: &str| given.inputs.get(name).is_some_and(|given| given.shape.is_some());
    let free: Vec<_> = rows.filter(|(name, axes)| axes.contains(&-1) && !has_shape(name)).collect();
    let shown = |axes: &[i64], free: &str, between: &str| {
        let axis = |&axis: &i64| if axis < 0 { free.to_owned() } else { axis.to_string() };
        axes.iter().map(axis).collect::<Vec<_>>().join(between)
    };
    let inputs: Vec<_> =
        free.iter().map(|(name, axes)| format!("{name} [{}]", shown(axes, "?", ", "))).collect();
    let options: Vec<_> =
        free.iter().map(|(name, axes)| format!("--shape {name}={}", shown(axes, "128", "x"))).collect();
    let (inputs, options) = (inputs.join(", "), options.join(" "));
    let advice = "give the shape that requests have, without the batch axis, for example";
    (!free.is_empty()).then(|| format!("{inputs}; {advice}: {command} {options}"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || "give a number of seconds from 0 to 86400".to_owned();
    let seconds = text.parse().ok().filter(|seconds| (0.0..=86400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(wrong)
}

fn shape(text: &str) -> Result<(String, Vec<i64>), String> {
    let wrong = || format!("{text:?} is no shape; give an input's name and its axes, e.g. image=3x224x224");
    let (name, axes) = text.split_once('=').ok_or_else(wrong)?;
    let axes = axes.split('x').map(|axis| axis.parse().ok().filter(|&axis| axis > 0));
    Ok((name.to_owned(), axes.collect::<Option<_>>().ok_or_else(wrong)?))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::Parser;
    use shadowslice_config::WarmupInput;
    use shadowslice_shared::batch::RunFailure;

    use super::*;
    use shadowslice_control::process::plan_warm_up;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }

    fn parsed(arguments: &[&str]) -> Result<Options, clap::Error> {
        let all = [&["profile", "my model.onnx", "--device", "emulated"], arguments].concat();
        Command::try_parse_from(all).map(|command| command.options)
    }

    #[test]
    fn shapes_on_the_command_line() {
        assert_eq!(shape("image=3x224x224"), Ok(("image".to_owned(), vec![3, 224, 224])));
        for nonsense in ["image", "image=", "image=3x", "image=0", "image=-1x3"] {
            assert!(shape(nonsense).is_err(), "{nonsense}");
        }
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused_and_told_what_would() {
        for (option, nonsense, advice) in [
            ("--seconds", "nan", "from 0 to 86400"),
            ("--seconds", "-1", "from 0 to 86400"),
            ("--seconds", "inf", "from 0 to 86400"),
            ("--seconds", "1e30", "from 0 to 86400"),
            ("--runs", "0", "1..=1000000"),
            ("--runs", "4294967295", "1..=1000000"),
            ("--max-batch", "-1", "0..=4294967295"),
        ] {
            let fault = parsed(&[option, nonsense]).unwrap_err().to_string();
            assert!(fault.contains(option) && fault.contains(advice), "{fault}");
        }
        let options = parsed(&["--seconds", "0", "--runs", "1"]).unwrap();
        assert_eq!((options.seconds, options.runs), (Duration::ZERO, 1));
    }

    #[test]
    fn a_files_stem_becomes_a_name() {
        let mut options = parsed(&[]).unwrap();
        assert_eq!(options.name(), "my_model");
        for (file, name) in [("a/b-1.2.onnx", "b-1.2"), ("größe.onnx", "gr__e"), ("..", "model")] {
            options.model = file.into();
            assert_eq!(options.name(), name);
        }
    }

    #[test]
    fn faults_name_options_where_the_configuration_was_made_up() {
        let made_up = Path::new("/tmp/profile-1/profile.yaml");
        let said = "/tmp/profile-1/profile.yaml:1:9: models[0].path: gone\n\
                    /tmp/profile-1/profile.yaml:1:9: models[0].warmup.x: odd\n\
                    /tmp/profile-1/profile.yaml:1:9: models[0].queue: odd\ngiven.yaml:5:6: execution_ms.1: short";
        assert_eq!(
            instead_of_keys(said, made_up),
            "MODEL: gone\n--shape.x: odd\nmodels[0].queue: odd\ngiven.yaml:5:6: execution_ms.1: short"
        );
    }

    #[test]
    fn a_workers_advice_names_options() {
        let too_large = RunFailure::AnswerTooLarge { needed: 9, room: 8 };
        let advised = advice(&too_large.to_string());
        assert_eq!(advised, "the answer has 9 bytes and only 8 fit; give a smaller --max-batch");
        let of_shape = WarmupInput { shape: Some(vec![5]), values: None };
        let given = WarmupConfig { file: None, inputs: BTreeMap::from([("x".to_owned(), of_shape)]) };
        let unknown = plan_warm_up(&[], true, vec![1], &given).unwrap_err();
        assert_eq!(
            advice(&unknown.to_string()),
            "the model cannot be loaded: --shape x: the model has no such input"
        );
    }
}
