-- The name of the model that a gRPC call is about becomes a header, by which it is routed.
local EXTRACTED = "envoy.filters.http.grpc_field_extraction"
local HEADER = "x-shadowslice-model"

function envoy_on_request(handle)
  handle:headers():remove(HEADER)
  local extracted = handle:streamInfo():dynamicMetadata():get(EXTRACTED)
  if extracted and extracted["name"] then
    handle:headers():add(HEADER, extracted["name"][1] or "")
  end
end
