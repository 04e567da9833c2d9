pub(crate) mod answer;
pub(crate) mod check;
pub(crate) mod codec;
pub(crate) mod contents;
pub(crate) mod json;
pub(crate) mod object;
pub(crate) mod shared_memory;
pub(crate) mod values;
