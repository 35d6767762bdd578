"""A file with the exported contract: three classes red, green, blue; evidence from colour."""
import json, sys
import numpy as np, onnx
from onnx import helper as h, TensorProto as T, numpy_helper as nh
def make(path, K=2, S=32, P=8):
    n=[]; init=[]
    def c(name, value, dtype): init.append(nh.from_array(np.asarray(value,dtype),name)); return name
    def op(t, ins, out, **a): n.append(h.make_node(t, ins, [out] if isinstance(out,str) else out, **a)); return out
    op("Cast",["image"],"f",to=T.FLOAT); op("Transpose",["f"],"t",perm=[0,3,1,2])
    op("Shape",["image"],"shape"); 
    op("Gather",["shape",c("i0",[0],"int64")],"B"); op("Gather",["shape",c("hw",[1,2],"int64")],"HW")
    c("roi",[],"float32"); c("empty",[],"float32")
    op("Concat",["B",c("c3",[3],"int64"),c("s",[P,P],"int64")],"sizes",axis=0)
    op("Resize",["t","","","sizes"],"r",mode="linear",antialias=1,coordinate_transformation_mode="half_pixel")
    op("Div",["r",c("d",255.,"float32")],"x")
    w=np.full((3,3,1,1),-6.); 
    for i in range(3): w[i,i]=12.
    op("Conv",["x",c("w",w,"float32"),c("b",[-3.]*3,"float32")],"cells")
    op("ReduceMean",["cells",c("ax",[2,3],"int64")],"branch_logits",keepdims=0)
    op("Identity",["branch_logits"],"logits")
    op("Softmax",["logits"],"probability",axis=1); op("Sigmoid",["branch_logits"],"evidence")
    op("TopK",["logits",c("k",[K],"int64")],["tv","classes"],axis=1)
    op("Sigmoid",["cells"],"allmaps")
    op("Unsqueeze",["classes",c("u",[2,3],"int64")],"cu")
    op("Concat",["B",c("kpp",[K,P,P],"int64")],"es",axis=0)
    op("Expand",["cu","es"],"ce"); op("GatherElements",["allmaps","ce"],"maps",axis=1)
    op("Greater",["maps",c("half",.5,"float32")],"on"); op("Cast",["on"],"onf",to=T.FLOAT)
    op("ReduceMax",["onf",c("a2",[2],"int64")],"colson",keepdims=0)
    op("ReduceMax",["onf",c("a3",[3],"int64")],"rowson",keepdims=0)
    outs=[]
    op("Cast",["HW"],"HWf",to=T.FLOAT)
    for name,i in(("cols",1),("rows",0)):
        op("ArgMax",[name+"on"],name+"first",axis=2,keepdims=0); op("ArgMax",[name+"on"],name+"rl",axis=2,keepdims=0,select_last_index=1)
        op("Cast",[name+"first"],name+"a",to=T.FLOAT); op("Cast",[name+"rl"],name+"l",to=T.FLOAT)
        op("Add",[name+"l",c(name+"one",1.,"float32")],name+"l1")
        op("Gather",["HWf",c(name+"i",i,"int64")],name+"side"); op("Div",[name+"side",c(name+"P",float(P),"float32")],name+"cell")
        op("Mul",[name+"a",name+"cell"],name+"p0"); op("Mul",[name+"l1",name+"cell"],name+"p1e"); op("Sub",[name+"p1e",name+"one"],name+"p1")
    for o in("colsp0","rowsp0","colsp1","rowsp1"): op("Unsqueeze",[o,c(o+"u",[2],"int64")],o+"x")
    op("Concat",["colsp0x","rowsp0x","colsp1x","rowsp1x"],"rawboxes",axis=2)
    op("ReduceMax",["onf",c("a23",[2,3],"int64")],"any",keepdims=0); op("Unsqueeze",["any","colsp0u"],"anyu"); op("Mul",["rawboxes","anyu"],"boxes")
    op("ReduceMax",["maps","a23"],"peak",keepdims=0); op("Mul",["peak","any"],"scores")
    op("GatherElements",["evidence","classes"],"ke",axis=1); op("Greater",["ke","half"],"present")
    vi=h.make_tensor_value_info
    outs=[("probability",T.FLOAT,["B",3]),("evidence",T.FLOAT,["B",3]),("classes",T.INT64,["B",K]),("maps",T.FLOAT,["B",K,P,P]),("boxes",T.FLOAT,["B",K,4]),("scores",T.FLOAT,["B",K]),("present",T.BOOL,["B",K]),("logits",T.FLOAT,["B",3]),("branch_logits",T.FLOAT,["B",3])]
    g=h.make_graph(n,"g",[vi("image",T.UINT8,["B","H","W",3])],[vi(*o) for o in outs],init)
    m=h.make_model(g,opset_imports=[h.make_opsetid("",18)],ir_version=9)
    h.set_model_props(m,{"class_names":json.dumps(["red","green","blue"]),"threshold":"0.5","scale":"probability","preprocessing":"inside","input_size":json.dumps([3,S,S]),"preprocess":json.dumps({"height":S,"width":S,"interpolation":"bilinear","resize":None})})
    onnx.checker.check_model(m); onnx.save(m,path)
if __name__=="__main__": make(sys.argv[1])
