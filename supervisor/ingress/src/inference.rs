//! An inference as gRPC carries it: its message read, and its answer written.

use std::sync::Arc;

use shadowslice_datapath::pipeline::Metadata;
use shadowslice_datapath::router::Route;
use shadowslice_datapath::trace::Journal;

use super::codec::in_turn;
use super::model::Answered;
use super::pools::Taken;
use super::proto::model_infer_response::InferOutputTensor;
use super::proto::{ModelInferRequest, ModelInferResponse};
use super::request_error::{RequestError, away};
use super::reserved::Reserved;
use super::tensors::InferRequest;
use super::{Frontend, contents, model};

/// A request, read.
pub(super) struct Inference {
    pub(super) name: String,
    pub(super) route: Route,
    pub(super) metadata: Arc<Metadata>,
    pub(super) request: InferRequest,
    /// Among the requests in flight.
    pub(super) _place: Taken,
}

pub(super) async fn inference(
    front: &Frontend,
    request: ModelInferRequest,
    journal: Option<&Journal>,
    reserved: &Reserved,
) -> Result<Inference, RequestError> {
    let name = request.model_name.clone();
    let route = model::find(&front.router, &name, &request.model_version)?;
    if let Some(journal) = journal {
        journal.set_model(&name);
        journal.set_id(&request.id);
    }
    let metadata = route.metadata_or_refuse(journal)?;
    let _place = reserved.client().admit().inspect_err(|_| route.count_host_refusal(journal))?;
    let request = match contents::is_quick(&request) {
        true => contents::request(request),
        false => away("reading the tensors", move || in_turn(|| contents::request(request))).await,
    };
    let request = model::count_malformed(&route, request.map_err(RequestError::from))?;
    Ok(Inference { name, route, metadata, request, _place })
}

pub(super) fn response(model: String, id: String, outputs: Vec<Answered>) -> ModelInferResponse {
    let mut response = ModelInferResponse {
        model_name: model,
        model_version: model::VERSION.to_owned(),
        id,
        ..Default::default()
    };
    for output in outputs {
        response.outputs.push(InferOutputTensor {
            name: output.name,
            datatype: output.datatype.name().to_owned(),
            shape: output.shape,
            ..Default::default()
        });
        response.raw_output_contents.push(output.data);
    }
    response
}
